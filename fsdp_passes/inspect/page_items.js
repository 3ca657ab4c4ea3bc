"use strict";
// What the page draws, as data: bars, pauses and steps of the memory curve, and what is said about each.
const data = JSON.parse(document.getElementById("data").textContent);
const [START, DURATION, UNIT, PHASE, KIND, NAME, BYTES, EXPOSED, REASON, PARTS] = [...Array(10).keys()];
const PHASES = ["", "forward", "backward"];
const SHORT = { all_gather: "AG ", reduce_scatter: "RS ", all_reduce: "AR " };

const escape = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const unitName = (unit) => (unit < 0 ? "no unit" : data.units[unit]);
const fill = (unit) => (unit < 0 ? "var(--none)" : `var(--unit${unit % 8})`);
const pattern = (unit) => (unit < 0 ? 0 : Math.floor(unit / 8) % 5);

function time(us) {
  const size = Math.abs(us);
  if (size >= 1e6) return `${+(us / 1e6).toPrecision(4)} s`;
  if (size >= 1e3) return `${+(us / 1e3).toPrecision(4)} ms`;
  return `${+us.toPrecision(3)} µs`;
}
function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = count > 0 ? Math.min(4, Math.floor(Math.log2(count) / 10)) : 0;
  const value = count / 1024 ** power;
  return `${+value.toPrecision(value >= 1000 ? 4 : 3)} ${units[power]}`;
}
const what = (item) =>
  item.gap ? (item.waits ? "compute waits" : "idle") : item.memory ? "unsharded memory" : data.kinds[item.span[KIND]].replace("_", "-");

// ---- what can be pointed at: bars, gaps of the compute row, steps of the memory curve ----

function itemsOf(row) {
  const items = row.spans.map((span) => ({ span, start: span[START], end: span[START] + span[DURATION], unit: span[UNIT] }));
  for (const [start, end, waits, reason] of row.gaps) items.push({ gap: true, waits, reason, start, end, unit: -2 });
  items.sort((a, b) => a.start - b.start || a.end - b.end);
  let reach = -Infinity; // the latest end so far, to find the first item in view
  for (const item of items) item.reach = reach = Math.max(reach, item.end);
  return items;
}
function memoryItems(timeline) {
  return timeline.memory.map(([start, count], index, all) => ({
    memory: true, start, end: index + 1 < all.length ? all[index + 1][0] : timeline.total, bytes: count, unit: -2, reach: Infinity,
  }));
}

function facts(item) {
  const found = [["from", `${time(item.start)} to ${time(item.end)}`]];
  if (item.memory) return [...found, ["gathered", bytes(item.bytes)]];
  found.push(["takes", time(item.end - item.start)]);
  if (item.gap) return item.reason ? [...found, ["why", item.reason]] : found;
  const span = item.span;
  if (item.count > 1) return item.exposed > 0 ? [...found, ["exposed", time(item.exposed), true]] : found;
  if (span[BYTES]) found.push(["moves", `${bytes(span[BYTES])}, ${bytes((span[BYTES] / span[DURATION]) * 1e6)}/s`]);
  if (span[EXPOSED] > 0) found.push(["exposed", `${time(span[EXPOSED])} (${Math.round((100 * span[EXPOSED]) / span[DURATION])} %)`, true]);
  else if (SHORT[data.kinds[span[KIND]]]) found.push(["exposed", "nothing: hidden behind compute"]);
  if (span[REASON] >= 0) found.push(["why", data.reasons[span[REASON]]]);
  if (span[NAME] >= 0) found.push(["name", data.names[span[NAME]]]);
  return found;
}
function heading(item) {
  if (item.gap || item.memory) return what(item);
  const phase = PHASES[item.span[PHASE]];
  if (item.count > 1) return `${item.count} bars of ${unitName(item.unit)}${phase ? `, ${phase}` : ""}`;
  return `${what(item)} of ${unitName(item.unit)}${phase ? `, ${phase}` : ""}`;
}
const spoken = (item) => `${heading(item)}; ${facts(item).map(([key, value]) => `${key} ${value}`).join("; ")}`;

function label(item, width) {
  const room = Math.floor((width - 6) / 6.3);
  if (room < 1) return "";
  const prefix = SHORT[data.kinds[item.span[KIND]]] || "";
  const name = item.unit < 0 ? (item.span[NAME] >= 0 && !prefix ? data.names[item.span[NAME]] : "") : unitName(item.unit);
  const last = item.unit < 0 ? "" : name.slice(name.lastIndexOf(".") + 1);
  return [prefix + name, prefix + last, last].find((text) => text.trim() && text.length <= room) || "";
}
