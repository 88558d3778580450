"use strict";
// Tables that say so can be sorted: every head becomes a button, which mouse and keyboard can press.
// A column of numbers begins with its largest, one of text with its first; then the other way round.
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b
    : String(a).localeCompare(String(b), undefined, { numeric: true }));
  heads.forEach((head, column) => {
    const isNumber = head.classList.contains("number");
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const next = now === null ? (isNumber ? "descending" : "ascending")
        : now === "ascending" ? "descending" : "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", next);
      const sign = next === "ascending" ? 1 : -1;
      const key = (row) => {
        const cell = row.cells[column];
        return "value" in cell.dataset ? Number(cell.dataset.value) : isNumber ? null : cell.textContent;
      };
      // What has no number comes last, whichever way.
      const known = [], unknown = [];
      for (const row of body.rows) (key(row) === null ? unknown : known).push(row);
      known.sort((a, b) => sign * compare(key(a), key(b)));
      body.append(...known, ...unknown);
    });
  });
}
// Paper cannot be unfolded: what is folded is opened for it, but for the numbers behind a figure, and closed again.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")].filter((each) => !each.closest("figure"));
  opened.forEach((each) => { each.open = true; });
});
addEventListener("afterprint", () => opened.forEach((each) => { each.open = false; }));
