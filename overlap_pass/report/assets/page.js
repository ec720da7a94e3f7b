// The decisions, the download, and the start of everything.

const MOST = 200;
const decisions = comparison.decisions;
const filter = document.getElementById("decisions-filter");

function listDecisions() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const matching = decisions.filter((decision) => {
    const all = `${decision.op} ${decision.action} ${decision.reason}`.toLowerCase();
    return words.every((word) => all.includes(word));
  });
  const rows = matching.slice(0, MOST).map((decision) => {
    const row = element("tr");
    row.append(element("td", decision.op), element("td", decision.action),
      element("td", String(decision.moved_over)), element("td", decision.reason));
    return row;
  });
  document.querySelector(".decisions tbody").replaceChildren(...rows);
  document.getElementById("decisions-count").textContent = rows.length === decisions.length
    ? `${decisions.length}` : `${rows.length} of ${matching.length === decisions.length ? "" : `${matching.length} matching, `}${decisions.length}`;
}
if (decisions.length) {
  document.getElementById("decisions").hidden = false;
  filter.addEventListener("input", listDecisions);
  listDecisions();
}

document.getElementById("download").addEventListener("click", () => {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([comparisonText], { type: "application/json" }));
  link.download = "comparison.json";
  link.click();
  URL.revokeObjectURL(link.href);
});

readColours();
draw();
new ResizeObserver(redraw).observe(stage);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); redraw(); });
