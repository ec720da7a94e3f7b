// The canvas with both timelines: where things are, and how they are drawn.

const canvas = document.getElementById("lanes");
const stage = canvas.parentElement;
const context = canvas.getContext("2d");
const AXIS = 26, HEAD = 30, ROW = 24, GAP = 5, FOOT = 16;
const view = { start: 0, end: totalNs };
let selected = null, width = 0, gutter = 0, colours = {}, family = "", hatch = null, pending = false;

let height = AXIS;
for (const side of sides) {
  side.top = height;
  side.lanes.forEach((lane, i) => { lane.top = side.top + HEAD + i * (ROW + GAP); });
  height = side.top + HEAD + side.lanes.length * (ROW + GAP) + FOOT;
  side.bottom = height - FOOT;
}

const perPixel = () => (view.end - view.start) / Math.max(1, width - gutter);
const toX = (ns) => gutter + (ns - view.start) / perPixel();
const toNs = (x) => view.start + (x - gutter) * perPixel();

function show(start, end) {
  const length = Math.min(totalNs, Math.max(40, end - start));
  view.start = Math.min(Math.max(0, start), totalNs - length);
  view.end = view.start + length;
  redraw();
}
const zoom = (factor, aroundNs = (view.start + view.end) / 2) =>
  show(aroundNs - (aroundNs - view.start) * factor, aroundNs + (view.end - aroundNs) * factor);
const pan = (ns) => show(view.start + ns, view.end + ns);

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ink", "muted", "rule", "track", "compute", "on-compute", "hidden", "on-hidden", "exposed",
    "exposed-line", "copy", "on-copy", "wait", "better", "worse", "focus", "panel"];
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  family = getComputedStyle(document.body).fontFamily;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const brush = tile.getContext("2d");
  brush.fillStyle = colours.exposed;
  brush.fillRect(0, 0, 8, 8);
  brush.strokeStyle = colours["exposed-line"];
  brush.lineWidth = 1.4;
  for (const shift of [-8, 0, 8]) {
    brush.beginPath();
    brush.moveTo(shift - 1, 9);
    brush.lineTo(shift + 9, -1);
    brush.stroke();
  }
  hatch = context.createPattern(tile, "repeat");
}

function text(words, x, y, { colour = colours.muted, font = "12px", align = "left", room = Infinity } = {}) {
  context.font = `${font} ${family}`;
  context.fillStyle = colour;
  context.textAlign = align;
  if (room < Infinity && context.measureText(words).width > room) {
    let keep = words.length;
    while (keep > 1 && context.measureText(words.slice(0, keep) + "…").width > room) keep = Math.floor(keep * 0.9);
    if (keep <= 3) return;
    words = words.slice(0, keep) + "…";
  }
  context.fillText(words, x, y);
}

function drawAxis() {
  const target = (view.end - view.start) / Math.max(2, (width - gutter) / 110);
  const power = 10 ** Math.floor(Math.log10(target));
  const step = Math.max(1, [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= target));
  for (let ns = Math.ceil(view.start / step) * step; ns <= view.end; ns += step) {
    const x = Math.round(toX(ns)) + 0.5;
    context.strokeStyle = colours.rule;
    context.beginPath();
    context.moveTo(x, AXIS - 8);
    context.lineTo(x, height - FOOT + 6);
    context.stroke();
    const align = ns === 0 ? "left" : x > width - 30 ? "right" : "center";
    text(tickText(ns, step), x, 13, { align });
  }
}

function tickText(ns, step) {
  const [size, unit] = view.end < 1000 ? [1, "ns"] : view.end < 1e6 ? [1e3, "µs"] : [1e6, "ms"];
  return `${(ns / size).toFixed(Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9)))} ${unit}`;
}

function drawSide(side) {
  const other = sides.find((candidate) => candidate !== side);
  const endX = Math.min(width, toX(side.windowNs));
  text(side.label, 0, side.top + 19, { colour: colours.ink, font: "600 13px", room: gutter + 240 });
  for (const lane of side.lanes) {
    context.fillStyle = colours.track;
    if (endX > gutter) context.fillRect(gutter, lane.top, endX - gutter, ROW);
    if (lane.kind === "compute") drawWaits(side, lane);
    drawLane(lane);
    context.fillStyle = colours.panel;
    context.fillRect(0, lane.top, gutter, ROW);
    const words = lane.lane === lane.kind ? lane.lane : `${lane.lane} · ${lane.kind}`;
    text(gutter < 100 ? lane.lane : words, 0, lane.top + 16, { room: gutter - 10 });
  }
  drawEnd(side, endX, other);
}

/** Tints the compute lane where it waits for a collective. */
function drawWaits(side, lane) {
  context.fillStyle = colours.wait;
  let paintedTo = -1;
  for (const [start, end] of partsWithin(side.exposed, view.start, view.end)) {
    const left = Math.max(paintedTo, toX(start)), right = Math.max(left, toX(end));
    if (right - left < 0.5) continue;
    context.fillRect(left, lane.top, right - left, ROW);
    paintedTo = right;
  }
}

function drawEnd(side, endX, other) {
  if (toX(side.windowNs) < gutter || toX(side.windowNs) > width + 1) return;
  context.strokeStyle = colours.ink;
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(endX - 0.75, side.top + 8);
  context.lineTo(endX - 0.75, side.bottom);
  context.stroke();
  context.lineWidth = 1;
  text(timeText(side.windowNs), endX - 7, side.top + 19, { colour: colours.ink, font: "600 13px", align: "right" });
  const savedNs = other.windowNs - side.windowNs;
  if (savedNs <= 0) return;
  const words = `${timeText(savedNs, totalNs)} shorter`;
  const colour = side.key === "after" ? colours.better : colours.worse;
  const room = width - endX - 8;
  if (room > 90) text(words, endX + 8, side.top + 19, { colour, font: "600 13px", room });
}

function drawLane(lane) {
  const scale = perPixel();
  // Below a pixel, spans would be painted over each other: one for each pixel is enough, and red wins.
  let pixel = -1, isRed = false;
  for (let i = firstReaching(lane, view.start); i < lane.spans.length && lane.spans[i].start < view.end; i++) {
    const span = lane.spans[i];
    const x = toX(span.start);
    const size = (span.end - span.start) / scale;
    if (size >= 1) {
      drawSpan(lane, span, x, size);
      continue;
    }
    const red = 2 * span.exposedNs > span.end - span.start;
    if (Math.floor(x) === pixel && (isRed || !red)) continue;
    [pixel, isRed] = [Math.floor(x), red];
    context.fillStyle = red ? colours.exposed : colours[fillOf(span)];
    context.fillRect(pixel, lane.top, 1, ROW);
  }
}

const fillOf = (span) => span.kind === "communication" ? "hidden" : span.kind;

function firstReaching(lane, time) {
  let low = 0, high = lane.reach.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.reach[middle] > time) high = middle; else low = middle + 1;
  }
  return low;
}

function drawSpan(lane, span, x, size) {
  const left = Math.max(x, gutter - 2), right = Math.min(x + size, width + 2);
  const margin = size > 4 ? 0.75 : 0;
  context.fillStyle = colours[fillOf(span)];
  context.fillRect(left, lane.top, Math.max(0.8, right - left - margin), ROW);
  context.fillStyle = hatch;
  for (const [start, end] of span.parts) {
    const from = Math.max(left, toX(start)), to = Math.min(right - margin, Math.max(toX(end), toX(start) + 1));
    if (to > from) context.fillRect(from, lane.top, to - from, ROW);
  }
  if (right - left > 44) labelSpan(lane, span, left, right);
  if (selected && selected.span === span) {
    context.strokeStyle = colours.ink;
    context.lineWidth = 2;
    context.strokeRect(left - 1, lane.top - 2, Math.max(3, right - left + 1), ROW + 4);
    context.lineWidth = 1;
  }
}

function labelSpan(lane, span, left, right) {
  const words = span.unit || span.collective || shortName(span.name);
  const red = span.parts.length > 0;
  const room = right - left - 14;
  context.font = `11.5px ${family}`;
  if (red) {
    const plate = Math.min(room, context.measureText(words).width) + 8;
    if (room < 40) return;
    context.fillStyle = colours.panel;
    context.fillRect(left + 3, lane.top + 4, plate, ROW - 8);
  }
  const colour = red ? colours.ink : colours[`on-${fillOf(span)}`];
  text(words, left + 7, lane.top + 16, { colour, font: "11.5px", room });
}

function draw() {
  pending = false;
  const ratio = window.devicePixelRatio || 1;
  width = stage.clientWidth;
  gutter = width < 760 ? 84 : 168;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.textBaseline = "alphabetic";
  drawAxis();
  sides.forEach(drawSide);
}

function redraw() {
  if (!pending) { pending = true; requestAnimationFrame(draw); }
}
