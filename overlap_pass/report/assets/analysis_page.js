// What differs from a page with two sides, the download, and the start of everything. These functions take the place of
// those of the same name in stage.js: the last declaration in a script holds.

/** In the compute lane: red where it waits for a collective, hatched where the CPU had not launched the next kernel. */
function drawWaits(side, lane) {
  paint(lane, side.exposed, colours.wait);
  paint(lane, side.late, lateHatch());
}

function paint(lane, intervals, style) {
  context.fillStyle = style;
  let paintedTo = -1;
  for (const [start, end] of partsWithin(intervals, view.start, view.end)) {
    const left = Math.max(paintedTo, toX(start)), right = Math.max(left, toX(end));
    if (right - left < 0.5) continue;
    context.fillRect(left, lane.top, right - left, ROW);
    paintedTo = right;
  }
}

let latePattern = null;

function lateHatch() {
  if (latePattern) return latePattern;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const brush = tile.getContext("2d");
  brush.strokeStyle = colours.muted;
  brush.lineWidth = 1.2;
  for (const shift of [-6, 0, 6]) {
    brush.beginPath();
    brush.moveTo(shift - 1, -1);
    brush.lineTo(shift + 7, 7);
    brush.stroke();
  }
  latePattern = context.createPattern(tile, "repeat");
  return latePattern;
}

/** The end of a step, with its length. */
function drawEnd(side, endX) {
  if (toX(side.windowNs) < gutter || toX(side.windowNs) > width + 1) return;
  context.fillStyle = colours.ink;
  context.fillRect(endX - 1.5, side.top + 8, 1.5, side.bottom - side.top - 8);
  text(timeText(side.windowNs), endX - 7, side.top + 19, { colour: colours.ink, font: "600 13px", align: "right" });
}

document.getElementById("download").addEventListener("click", () => {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([analysisText], { type: "application/json" }));
  link.download = "analysis.json";
  link.click();
  URL.revokeObjectURL(link.href);
});

readColours();
draw();
new ResizeObserver(redraw).observe(stage);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  latePattern = null;
  readColours();
  redraw();
});
