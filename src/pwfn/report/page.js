"use strict";
// Tables with data-sortable can be sorted: every head becomes a button for mouse and keyboard. A column of numbers is first
// sorted in descending order, one of text in ascending order, and then in reverse.
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
      // Rows without a number are last in both orders.
      const known = [], unknown = [];
      for (const row of body.rows) (key(row) === null ? unknown : known).push(row);
      known.sort((a, b) => sign * compare(key(a), key(b)));
      body.append(...known, ...unknown);
    });
  });
}
// Paper cannot be unfolded: what is folded is opened for printing and closed again. The numbers behind a figure and the
// full list of settings are not printed.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")].filter((each) => !each.closest("figure, .settings"));
  opened.forEach((each) => { each.open = true; });
});
addEventListener("afterprint", () => opened.forEach((each) => { each.open = false; }));
