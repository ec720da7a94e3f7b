// Pointing at the timelines and moving through them, by mouse and by keyboard.

const tip = document.getElementById("tip");

function facts({ span, side }) {
  const rows = [["lane", `${span.lane}, ${side.label}`]];
  if (span.collective) rows.push(["collective", span.collective]);
  if (span.unit) rows.push(["serves", span.unit]);
  rows.push(["start", preciseText(span.start)], ["takes", preciseText(span.end - span.start)]);
  if (span.kind === "communication") rows.push(["exposed", preciseText(span.exposedNs)]);
  if (span.payload !== null) rows.push(["payload", sizeText(span.payload)]);
  return rows;
}

function showTip(found, x) {
  tip.replaceChildren(element("strong", found.span.name));
  const list = element("dl");
  for (const [name, value] of facts(found))
    list.append(element("dt", name), element("dd", value, name === "exposed" && found.span.exposedNs ? "red" : ""));
  tip.append(list);
  tip.hidden = false;
  const left = Math.min(Math.max(0, x + 14), width - tip.offsetWidth);
  const below = found.lane.top + ROW + 8;
  const roomBelow = below + tip.offsetHeight < height + 60;
  tip.style.left = `${left}px`;
  tip.style.top = `${roomBelow ? below : found.lane.top - tip.offsetHeight - 8}px`;
}

function hideTip() { tip.hidden = true; }

/** The span under a point; a near miss of two pixels counts. */
function spanAt(x, y) {
  if (x < gutter) return null;
  const near = 2 * perPixel(), time = toNs(x);
  for (const side of sides) for (const lane of side.lanes) {
    if (y < lane.top || y >= lane.top + ROW) continue;
    let best = null, distance = near;
    for (let i = firstReaching(lane, time - near); i < lane.spans.length; i++) {
      const span = lane.spans[i];
      if (span.start > time + near) break;
      const away = Math.max(0, span.start - time, time - span.end);
      if (away < distance || (away === distance && !best)) { best = span; distance = away; }
      if (away === 0) break;
    }
    return best && { side, lane, span: best };
  }
  return null;
}

function select(found) {
  selected = found;
  const { span, side } = found;
  const length = span.end - span.start;
  if (span.start < view.start || span.end > view.end || length / perPixel() < 8) {
    const margin = Math.max(4 * length, totalNs / 200);
    show(span.start - margin, span.end + margin);
  }
  redraw();
  requestAnimationFrame(() => showTip(found, Math.max(gutter, toX(span.start))));
  document.getElementById("spoken").textContent =
    `${span.name}, ${side.label}: ${facts(found).slice(1).map((row) => row.join(" ")).join(", ")}`;
}

function stepTo(direction) {
  if (!stops.length) return;
  const at = stops.findIndex((stop) => selected && stop.span === selected.span);
  const next = at < 0 ? (direction > 0 ? 0 : stops.length - 1) : (at + direction + stops.length) % stops.length;
  select(stops[next]);
}

function clearSelection() { selected = null; hideTip(); redraw(); }

const KEYS = {
  "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "_": () => zoom(1 / 0.6),
  ArrowLeft: () => pan((view.start - view.end) * 0.15), ArrowRight: () => pan((view.end - view.start) * 0.15),
  ArrowDown: () => stepTo(1), ArrowUp: () => stepTo(-1),
  "0": () => show(0, totalNs), Home: () => show(0, totalNs), Escape: clearSelection,
};
canvas.addEventListener("keydown", (event) => {
  if (!(event.key in KEYS) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  if (!event.key.startsWith("Arrow") || event.key === "ArrowLeft" || event.key === "ArrowRight") hideTip();
  KEYS[event.key]();
});

canvas.addEventListener("wheel", (event) => {
  const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
  const all = view.end - view.start >= totalNs;
  if (all && (sideways || event.deltaY > 0)) return;  // nothing to zoom out of: the page scrolls
  event.preventDefault();
  hideTip();
  const unit = event.deltaMode === 1 ? 16 : 1;
  if (sideways) pan(event.deltaX * unit * perPixel());
  else zoom(Math.exp(event.deltaY * unit * 0.0022), toNs(Math.max(gutter, event.offsetX)));
}, { passive: false });

let drag = null;
canvas.addEventListener("pointerdown", (event) => {
  drag = { x: event.offsetX, moved: false };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (!drag) {
    const found = spanAt(event.offsetX, event.offsetY);
    if (found) showTip(found, event.offsetX); else hideTip();
    return;
  }
  const distance = event.offsetX - drag.x;
  if (!drag.moved && Math.abs(distance) < 3) return;
  hideTip();
  canvas.classList.add("dragging");
  pan(-distance * perPixel());
  drag = { x: event.offsetX, moved: true };
});
canvas.addEventListener("pointerup", (event) => {
  if (drag && !drag.moved) {
    const found = spanAt(event.offsetX, event.offsetY);
    if (found) select(found); else clearSelection();
  }
  drag = null;
  canvas.classList.remove("dragging");
});
canvas.addEventListener("pointercancel", () => { drag = null; canvas.classList.remove("dragging"); });
canvas.addEventListener("pointerleave", () => { if (!drag) hideTip(); });
canvas.addEventListener("blur", hideTip);
document.getElementById("zoom-in").addEventListener("click", () => zoom(0.5));
document.getElementById("zoom-out").addEventListener("click", () => zoom(2));
document.getElementById("zoom-fit").addEventListener("click", () => { clearSelection(); show(0, totalNs); });

for (const button of document.querySelectorAll(".find")) button.addEventListener("click", () => {
  const { side, lane, start, name } = button.dataset;
  const found = stops.find((stop) => stop.side.key === side && stop.lane.lane === lane &&
    stop.span.start === Number(start) && stop.span.name === name);
  if (!found) return;
  canvas.focus({ preventScroll: true });
  stage.parentElement.scrollIntoView({ block: "nearest" });
  select(found);
});
