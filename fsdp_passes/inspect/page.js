// Draws the timelines of the page. Everything in view is drawn anew when the view changes; bars below a pixel are joined,
// so that the number of elements follows the screen's width and not the length of the trace.
const card = document.getElementById("card");
const [BAR, LABEL, MEMORY, AXIS, GAP, EDGE] = [30, 18, 70, 20, 8, 1]; // heights in pixels, EDGE a width
const PHASE_STRIP = 20;
const OUTLINE = { reduce_scatter: " scatter", all_reduce: " reduce" };

// ---- one section: its timelines share the view ----

class Section {
  constructor(element, section) {
    this.element = element;
    this.total = Math.max(...section.timelines.map((timeline) => timeline.total), 1e-9);
    this.view = [0, this.total];
    this.plots = section.timelines.map((timeline, index) => new Plot(this, element.querySelectorAll("figure")[index], timeline));
    const [closer, farther, all] = element.querySelectorAll(".tools button");
    this.buttons = { closer, farther, all };
    closer.addEventListener("click", () => this.zoom(0.5));
    farther.addEventListener("click", () => this.zoom(2));
    all.addEventListener("click", () => this.show(0, this.total));
    this.draw();
  }
  show(begin, end) {
    const width = clamp(end - begin, Math.min(this.total, Math.max(this.total / 5000, 0.01)), this.total);
    const start = clamp(begin, 0, this.total - width);
    if (start === this.view[0] && start + width === this.view[1]) return;
    this.view = [start, start + width];
    if (!this.waiting) {
      this.waiting = true; // many wheel events, one drawing
      requestAnimationFrame(() => { this.waiting = false; this.draw(); });
    }
  }
  zoom(factor, around = (this.view[0] + this.view[1]) / 2) {
    const [begin, end] = this.view;
    this.show(around - (around - begin) * factor, around + (end - around) * factor);
  }
  move(by) { this.show(this.view[0] + by, this.view[1] + by); }
  draw() {
    const [begin, end] = this.view;
    const isAll = end - begin >= this.total * 0.9999;
    this.buttons.farther.disabled = this.buttons.all.disabled = isAll;
    this.element.querySelector(".window").textContent = `${time(begin)} to ${time(end)}`;
    const bar = this.element.querySelector(".overview i");
    bar.style.left = `${(100 * begin) / this.total}%`;
    bar.style.width = `${(100 * (end - begin)) / this.total}%`;
    for (const plot of this.plots) { plot.svg.classList.toggle("can-move", !isAll); plot.draw(); }
  }
}

class Plot {
  constructor(section, figure, timeline) {
    Object.assign(this, { section, figure, timeline });
    this.svg = figure.querySelector(".plot");
    this.rows = timeline.rows.map((row) => ({ ...row, items: itemsOf(row) }));
    if (timeline.memory.length) this.rows.push({ name: "unsharded memory", memory: true, items: memoryItems(timeline) });
    this.peak = Math.max(1, ...timeline.memory.map(([, count]) => count));
    this.focus = this.rows.length ? [0, 0] : null; // (row, item) that the Tab key reaches
    let top = PHASE_STRIP;
    for (const row of this.rows) {
      row.top = top + LABEL;
      row.height = row.memory ? MEMORY : BAR;
      top = row.top + row.height + GAP;
    }
    this.height = top + AXIS;
    this.svg.setAttribute("height", this.height);
    this.listen();
    figure.querySelector(".all")?.addEventListener("toggle", (event) => event.target.open && this.fillTable(event.target));
  }
  x(at) { return EDGE + ((at - this.section.view[0]) / (this.section.view[1] - this.section.view[0])) * (this.width - 2 * EDGE); }
  at(x) { return this.section.view[0] + ((x - EDGE) / (this.width - 2 * EDGE)) * (this.section.view[1] - this.section.view[0]); }

  draw() {
    this.width = Math.max(this.svg.clientWidth, 50);
    const held = document.activeElement?.closest?.(".item") && this.svg.contains(document.activeElement);
    this.svg.innerHTML = this.drawAxis() + this.drawPhases() + this.rows.map((row, index) => this.drawRow(row, index)).join("");
    if (held) this.element(this.focus)?.focus({ preventScroll: true });
    else if (this.focus && !this.element(this.focus)) this.svg.querySelector(".item")?.setAttribute("tabindex", "0");
  }
  drawAxis() {
    const [begin, end] = this.section.view;
    const rough = ((end - begin) * 85) / this.width;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => power * factor >= rough);
    let out = "";
    for (let at = Math.ceil(begin / step) * step; at <= end; at += step) {
      const x = this.x(at);
      const anchor = x < 20 ? "start" : x > this.width - 25 ? "end" : "middle";
      out += `<path class="tick" d="M${x} ${PHASE_STRIP}V${this.height - AXIS}"/><text x="${x}" y="${this.height - 5}" text-anchor="${anchor}">${time(at)}</text>`;
    }
    return out;
  }
  drawPhases() {
    let out = "";
    for (const [phase, begin, end] of this.timeline.phases) {
      const [left, right] = [Math.max(this.x(begin), EDGE), Math.min(this.x(end), this.width - EDGE)];
      if (right - left < 4) continue;
      out += `<path class="phase" d="M${left + 0.5} ${PHASE_STRIP - 1}V9.5H${right - 0.5}V${PHASE_STRIP - 1}"/>`;
      if (right - left > 72) out += `<text class="phase-name" x="${left + 8}" y="13">${PHASES[phase]}</text>`;
    }
    return out;
  }
  drawRow(row, index) {
    const out = [`<text x="${EDGE}" y="${row.top - 4}">${escape(row.name)}</text>`];
    out.push(`<rect class="ground" x="0" y="${row.top}" width="${this.width}" height="${row.height}"/>`);
    const [begin, end] = this.section.view;
    if (row.memory) out.push(this.drawCurve(row));
    const { items } = row;
    let low = 0, high = items.length;
    while (!row.memory && low < high) { const middle = (low + high) >> 1; if (items[middle].reach < begin) low = middle + 1; else high = middle; }
    let joined = null; // neighbours of one unit that are too narrow to be told apart
    const flush = () => { if (joined) out.push(this.drawItem(row, index, joined.first, joined.count > 1 ? joined : joined.item, joined.left, Math.max(joined.right - joined.left, 0.8), joined.isFocus)); joined = null; };
    for (let i = row.memory ? 0 : low; i < items.length && items[i].start <= end; i++) {
      const item = items[i];
      if (item.end < begin) continue;
      const left = Math.max(this.x(item.start), -4), right = Math.min(this.x(item.end), this.width + 4);
      const isFocus = this.focus?.[0] === index && this.focus[1] === i;
      if (item.gap && right - left < 2.5 && !isFocus) continue;
      const isNarrow = right - left < 2 && !item.memory && !item.gap && !isFocus;
      if (isNarrow && joined?.isNarrow && joined.unit === item.unit && left < joined.right + 1 && right - joined.left < 40) {
        joined.count += 1;
        joined.right = Math.max(joined.right, right);
        joined.end = Math.max(joined.end, item.end);
        joined.exposed += item.span[EXPOSED];
        joined.parts.push(...(item.span[PARTS] || []));
        continue;
      }
      flush();
      joined = { item, first: i, count: 1, left, right, start: item.start, end: item.end, unit: item.unit, span: item.span, exposed: item.span?.[EXPOSED] || 0, parts: [...(item.span?.[PARTS] || [])], isNarrow, isFocus };
    }
    flush();
    return `<g role="list" aria-label="${escape(row.name)}">${out.join("")}</g>`;
  }
  drawItem(row, index, i, item, left, width, isFocus) {
    const { top, height } = row;
    const box = `x="${left.toFixed(2)}" width="${width.toFixed(2)}"`;
    let inside;
    if (item.memory) inside = `<rect fill="transparent" ${box} y="${top}" height="${height}"/>`;
    else if (item.gap) {
      const inner = `x="${(left + 1).toFixed(2)}" width="${Math.max(width - 2, 0.8).toFixed(2)}"`;
      inside = `<rect class="gap${item.waits ? " waits" : ""}" ${inner} y="${top + 1.5}" height="${height - 3}"/>`;
      const text = item.waits ? "waits" : "idle";
      if (width > 40) inside += `<text class="gap-label${item.waits ? " waits" : ""}" x="${left + width / 2}" y="${top + height / 2 + 4}" text-anchor="middle">${text}</text>`;
    } else {
      const kind = data.kinds[item.span[KIND]];
      inside = `<rect class="bar${(width > 5 && OUTLINE[kind]) || ""}" style="--fill:${fill(item.unit)}" ${box} y="${top + 1}" height="${height - 2}" rx="${width > 6 ? 2 : 0}"/>`;
      if (pattern(item.unit) && width > 3) inside += `<rect class="overlay" fill="url(#pattern${pattern(item.unit)})" ${box} y="${top + 1}" height="${height - 2}"/>`;
      for (const [begin, end] of item.parts || item.span[PARTS] || []) {
        const [from, to] = [Math.max(this.x(begin), -4), Math.min(this.x(end), this.width + 4)];
        if (to > from) inside += `<rect class="exposed" x="${from.toFixed(2)}" y="${top + height - 10}" width="${Math.max(to - from, 1).toFixed(2)}" height="9"/>`;
      }
      const shown = Math.max(left, 0);
      const text = label(item, Math.min(left + width, this.width) - shown);
      if (text) inside += `<text x="${(shown + 4).toFixed(1)}" y="${top + (item.span[PARTS] ? 15 : height / 2 + 4)}">${escape(text)}</text>`;
    }
    return `<g class="item" role="listitem" tabindex="${isFocus ? 0 : -1}" data-row="${index}" data-item="${i}" data-count="${item.count || 1}" data-unit="${item.unit}" aria-label="${escape(spoken(item))}">${inside}</g>`;
  }
  drawCurve(row) {
    const points = this.timeline.memory;
    const y = (count) => row.top + row.height - (count / this.peak) * (row.height - 12);
    let path = `M${this.x(points[0][0])} ${y(0)}`;
    for (const [at, count] of points) path += `H${clamp(this.x(at), -50, this.width + 50).toFixed(1)}V${y(count).toFixed(1)}`;
    path += `H${this.x(this.timeline.total)}V${y(0)}Z`;
    return `<path class="curve" d="${path}"/><text x="${this.width - 3}" y="${row.top - 4}" text-anchor="end">peak ${bytes(this.peak)}</text>`;
  }

  // ---- pointing ----

  element(focus) { return focus && this.svg.querySelector(`[data-row="${focus[0]}"][data-item="${focus[1]}"]`); }
  // Several bars that are drawn as one are told as one.
  itemAt(element) {
    const items = this.rows[element.dataset.row].items, first = +element.dataset.item, count = +element.dataset.count;
    if (count === 1) return items[first];
    const group = items.slice(first).filter((item) => item.span && item.unit === items[first].unit).slice(0, count);
    return { ...items[first], count, end: Math.max(...group.map((item) => item.end)), exposed: group.reduce((sum, item) => sum + item.span[EXPOSED], 0) };
  }
  show(element, isKey) {
    const item = this.itemAt(element);
    const lines = facts(item).map(([key, value, alarm]) => `<dt>${key}</dt><dd${alarm ? ' class="alarm"' : ""}>${escape(value)}</dd>`);
    card.innerHTML = `<b>${escape(heading(item))}</b><dl>${lines.join("")}</dl>`;
    card.hidden = false;
    const box = element.getBoundingClientRect(), frame = this.svg.getBoundingClientRect();
    const left = clamp(box.left, 8, Math.max(8, innerWidth - card.offsetWidth - 8));
    const below = box.bottom + 10;
    card.style.left = `${left}px`;
    card.style.top = `${below + card.offsetHeight < innerHeight ? below : Math.max(8, box.top - card.offsetHeight - 10)}px`;
    this.svg.querySelectorAll(".ring,.cursor").forEach((old) => old.remove());
    const [x, row] = [box.left - frame.left, this.rows[element.dataset.row]];
    const marks = `<path class="cursor" d="M${x} ${PHASE_STRIP}V${this.height - AXIS}"/>` +
      (isKey ? `<rect class="ring" x="${clamp(x, 1.5, this.width - 4)}" y="${row.top - 0.5}" width="${clamp(Math.min(box.right - frame.left, this.width - 1.5) - Math.max(x, 1.5), 3, this.width - 3)}" height="${row.height + 1}" rx="3"/>` : "");
    this.svg.insertAdjacentHTML("beforeend", marks);
    emphasize(item.unit >= 0 ? item.unit : chosen);
  }
  hide() {
    card.hidden = true;
    this.svg.querySelectorAll(".ring,.cursor").forEach((old) => old.remove());
    emphasize(chosen);
  }
  listen() {
    const { svg, section } = this;
    svg.addEventListener("pointerover", (event) => {
      const element = event.target.closest?.(".item");
      if (element && !this.drag) this.show(element, false);
    });
    svg.addEventListener("pointerleave", () => this.drag || this.hide());
    svg.addEventListener("pointerdown", (event) => { this.drag = { x: event.clientX, view: section.view, id: event.pointerId, moved: false }; });
    svg.addEventListener("pointermove", (event) => {
      if (!this.drag || Math.abs(event.clientX - this.drag.x) < 4) return;
      if (!this.drag.moved) { this.drag.moved = true; svg.setPointerCapture(this.drag.id); card.hidden = true; }
      const by = ((this.drag.x - event.clientX) / this.width) * (this.drag.view[1] - this.drag.view[0]);
      section.show(this.drag.view[0] + by, this.drag.view[1] + by);
    });
    svg.addEventListener("pointercancel", () => { this.drag = null; });
    svg.addEventListener("pointerup", (event) => {
      const moved = this.drag?.moved;
      this.drag = null;
      const element = event.target.closest?.(".item");
      if (element && !moved) this.go([+element.dataset.row, +element.dataset.item]);
    });
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      section.zoom(event.deltaY < 0 ? 0.8 : 1.25, this.at(event.clientX - svg.getBoundingClientRect().left));
    }, { passive: false });
    svg.addEventListener("focusin", (event) => {
      const element = event.target.closest?.(".item");
      if (!element) return;
      this.element(this.focus)?.setAttribute("tabindex", "-1");
      this.focus = [+element.dataset.row, +element.dataset.item];
      element.setAttribute("tabindex", "0");
      this.show(element, true);
    });
    svg.addEventListener("focusout", (event) => { if (!svg.contains(event.relatedTarget)) this.hide(); });
    svg.addEventListener("keydown", (event) => this.key(event));
  }
  go(focus) {
    this.focus = focus;
    const item = this.rows[focus[0]].items[focus[1]];
    const [begin, end] = this.section.view, width = end - begin;
    if (item.start < begin || item.start > end - width * 0.02) {
      this.section.view = [clamp(item.start - width / 4, 0, this.section.total - width), 0];
      this.section.view[1] = this.section.view[0] + width;
    }
    this.section.draw();
    // A gap or a bar that is too narrow to be drawn is brought closer until it is.
    for (let tries = 0; tries < 12 && !this.element(focus); tries++) {
      const around = (item.start + item.end) / 2, half = (this.section.view[1] - this.section.view[0]) / 4;
      this.section.view = [clamp(around - half, 0, this.section.total), clamp(around + half, 0, this.section.total)];
      this.section.draw();
    }
    this.element(focus)?.focus({ preventScroll: false });
  }
  nearest(row, at) {
    const { items } = this.rows[row];
    let best = 0, distance = Infinity;
    items.forEach((item, index) => {
      const away = at < item.start ? item.start - at : at > item.end ? at - item.end : 0;
      if (away < distance) [best, distance] = [index, away];
    });
    return best;
  }
  key(event) {
    if (!this.focus || event.ctrlKey || event.metaKey || event.altKey) return;
    const [row, index] = this.focus;
    const item = this.rows[row].items[index];
    const last = this.rows[row].items.length - 1;
    const filled = this.rows.map((_, i) => i).filter((i) => this.rows[i].items.length);
    const place = filled.indexOf(row);
    const jump = (to) => to !== undefined && this.go([to, this.nearest(to, (item.start + item.end) / 2)]);
    const width = this.section.view[1] - this.section.view[0];
    const actions = {
      ArrowLeft: () => index > 0 && this.go([row, index - 1]),
      ArrowRight: () => index < last && this.go([row, index + 1]),
      ArrowUp: () => jump(filled[place - 1]),
      ArrowDown: () => jump(filled[place + 1]),
      Home: () => this.go([row, 0]),
      End: () => this.go([row, last]),
      PageUp: () => this.section.move(-width * 0.8),
      PageDown: () => this.section.move(width * 0.8),
      "+": () => this.section.zoom(0.5, item.start),
      "=": () => this.section.zoom(0.5, item.start),
      "-": () => this.section.zoom(2, item.start),
      0: () => this.section.show(0, this.section.total),
      e: () => this.nextExposed(item),
      E: () => this.nextExposed(item),
      Escape: () => this.hide(),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }
  nextExposed(from) {
    const found = this.rows.flatMap((row, r) => row.items.map((item, i) => [item, r, i])).filter(([item]) => item.span?.[EXPOSED] > 0);
    found.sort(([a], [b]) => a.start - b.start);
    const next = found.find(([item]) => item.start > from.start) || found[0];
    if (next) this.go([next[1], next[2]]);
  }
  fillTable(details) {
    const body = details.querySelector("tbody");
    if (body.childElementCount) return;
    const rows = this.rows.filter((row) => !row.memory).flatMap((row) => row.items.filter((item) => item.span).map((item) => [row, item]));
    rows.sort(([, a], [, b]) => a.start - b.start);
    body.innerHTML = rows.map(([row, item]) => {
      const span = item.span;
      const cells = [unitName(item.unit), what(item), PHASES[span[PHASE]], row.name].map((text) => `<td class="words">${escape(text)}</td>`);
      cells.push(...[time(item.start), time(span[DURATION]), span[EXPOSED] ? time(span[EXPOSED]) : "", span[BYTES] ? bytes(span[BYTES]) : ""].map((text) => `<td>${text}</td>`));
      return `<tr>${cells.join("")}<td class="words">${span[REASON] >= 0 ? escape(data.reasons[span[REASON]]) : ""}</td></tr>`;
    }).join("");
  }
}

// ---- one unit alone: a rule of style, so that nothing has to be drawn anew ----

const rule = document.head.appendChild(document.createElement("style"));
let chosen = null;
function emphasize(unit) {
  rule.textContent = unit === null ? "" : `.item:not([data-unit="${unit}"]):not([data-unit="-2"]) { opacity: .3; }`;
}
const units = document.getElementById("units");
document.getElementById("key-all-reduce").hidden = !data.kinds.includes("all_reduce");
units.innerHTML = data.units.map((name, unit) => `<li><button aria-pressed="false"><svg aria-hidden="true"><rect class="bar" style="--fill:${fill(unit)}" width="18" height="14" rx="2"/>${pattern(unit) ? `<rect fill="url(#pattern${pattern(unit)})" width="18" height="14"/>` : ""}</svg>${escape(name)}</button></li>`).join("");
units.hidden = data.units.length === 0;
units.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const all = [...units.querySelectorAll("button")];
  const unit = all.indexOf(button);
  chosen = chosen === unit ? null : unit;
  all.forEach((other, index) => other.setAttribute("aria-pressed", String(index === chosen)));
  emphasize(chosen);
});

const sections = data.sections.map((section, index) => section.timelines.length && new Section(document.querySelectorAll("main > section")[index], section)).filter(Boolean);
new ResizeObserver(() => sections.forEach((section) => section.draw())).observe(document.querySelector("main"));
document.documentElement.dataset.drawn = "true";
