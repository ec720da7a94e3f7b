"use strict";

// What the page shows: one side for each device, its typical step, with lanes of spans.

const analysisText = document.getElementById("analysis").textContent;
const drawn = JSON.parse(document.getElementById("drawn").textContent);

const KINDS = ["compute", "communication", "copy"];

/** Parts of [start, end) that the sorted, disjoint intervals cover. */
function partsWithin(intervals, start, end) {
  let low = 0, high = intervals.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (intervals[middle][1] > start) high = middle; else low = middle + 1;
  }
  const parts = [];
  for (let i = low; i < intervals.length && intervals[i][0] < end; i++)
    parts.push([Math.max(start, intervals[i][0]), Math.min(end, intervals[i][1])]);
  return parts;
}

function readLane(row, device) {
  const lane = { kind: KINDS[row.kind], lane: row.lane, spans: [], reach: [] };
  for (const [start, end, name, collective, payload, unit] of row.spans) {
    const parts = lane.kind === "communication" ? partsWithin(device.exposed, start, end) : [];
    const exposedNs = parts.reduce((sum, part) => sum + part[1] - part[0], 0);
    const span = { name: drawn.names[name], kind: lane.kind, lane: row.lane, start, end, collective, payload, unit, parts, exposedNs };
    lane.spans.push(span);
    // The furthest end so far: sorted even where spans of a lane overlap, so that the first visible one can be searched.
    lane.reach.push(Math.max(end, lane.reach.length ? lane.reach[lane.reach.length - 1] : 0));
  }
  return lane;
}

const sides = drawn.devices.map((device) => ({
  key: device.key, label: device.label, predicted: false, windowNs: device.window_ns,
  lanes: device.lanes.map((row) => readLane(row, device)), exposed: device.exposed, late: device.late,
}));
const totalNs = Math.max(1, ...sides.map((side) => side.windowNs));
const stops = sides.flatMap((side) => side.lanes.flatMap((lane) =>
  lane.spans.filter((span) => span.exposedNs > 0).map((span) => ({ side, lane, span })))
  .sort((a, b) => a.span.start - b.span.start));

/** As the figures above the timelines are written; the unit is the one of likeNs. */
function timeText(ns, likeNs = ns) {
  return Math.abs(likeNs) < 1e6 ? `${(ns / 1e3).toFixed(1)} µs` : `${(ns / 1e6).toFixed(1)} ms`;
}

/** Every nanosecond. */
function preciseText(ns) {
  return Math.abs(ns) < 1e6 ? `${ns / 1e3} µs` : `${ns / 1e6} ms`;
}

function sizeText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0, size = bytes;
  while (size >= 1024 && power < units.length - 1) { size /= 1024; power++; }
  return `${size.toFixed(power === 0 || size >= 100 ? 0 : size >= 10 ? 1 : 2)} ${units[power]}`;
}

/** A kernel's name without return type, anonymous namespaces and arguments. */
function shortName(name) {
  return name.replace(/^void /, "").replaceAll("(anonymous namespace)::", "").split(/[<(]/)[0] || name;
}

function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}
