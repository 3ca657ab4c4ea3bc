"""What the measurement tools share: models, systems, timing, statistics, profiles, tables.

Nothing here belongs to the library. The tools beside this folder are thin: each parses its flags, starts its ranks and
prints the table that `bench.worker` fills.
"""
