"use strict";

// What the page shows: two sides, each with lanes of spans, and the words for figures.

const comparisonText = document.getElementById("comparison").textContent;
const comparison = JSON.parse(comparisonText);
const exposedIntervals = JSON.parse(document.getElementById("exposed").textContent);

const KINDS = ["compute", "communication", "copy"];
const SIDES = ["before", "after"];

/** Index of the first interval [start, end) that ends after time. */
function firstEndingAfter(intervals, time) {
  let low = 0, high = intervals.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (intervals[middle][1] > time) high = middle; else low = middle + 1;
  }
  return low;
}

/** Parts of [start, end) that the sorted, disjoint intervals cover. */
function partsWithin(intervals, start, end) {
  const parts = [];
  for (let i = firstEndingAfter(intervals, start); i < intervals.length && intervals[i][0] < end; i++)
    parts.push([Math.max(start, intervals[i][0]), Math.min(end, intervals[i][1])]);
  return parts;
}

function readSpan(row, exposed) {
  const [name, kind, lane, start, end, collective, payload, unit] = row;
  const parts = kind === "communication" ? partsWithin(exposed, start, end) : [];
  const exposedNs = parts.reduce((sum, part) => sum + part[1] - part[0], 0);
  return { name, kind, lane, start, end, collective, payload, unit, parts, exposedNs };
}

function readSide(key) {
  const { label, predicted, timeline } = comparison[key];
  const lanes = new Map();
  for (const row of timeline.spans) {
    const span = readSpan(row, exposedIntervals[key]);
    const id = JSON.stringify([span.kind, span.lane]);
    if (!lanes.has(id)) lanes.set(id, { kind: span.kind, lane: span.lane, spans: [], reach: [] });
    const found = lanes.get(id);
    found.spans.push(span);
    // The furthest end so far: sorted even where spans of a lane overlap, so that the first visible one can be searched.
    found.reach.push(Math.max(span.end, found.reach.length ? found.reach[found.reach.length - 1] : 0));
  }
  const ordered = [...lanes.values()].sort((a, b) =>
    KINDS.indexOf(a.kind) - KINDS.indexOf(b.kind) || a.lane.localeCompare(b.lane, "en", { numeric: true }));
  return { key, label, predicted, windowNs: timeline.window_ns, lanes: ordered, exposed: exposedIntervals[key] };
}

const sides = SIDES.map(readSide);
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
