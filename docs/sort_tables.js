// A click on a column's heading sorts its table by that column, and a second click the other way round.
function readCell(row, column) {
  const text = row.cells[column].textContent.trim().replace(/\u2212/g, "-").replace(/,/g, "");
  const number = parseFloat(text);
  return Number.isNaN(number) ? text.toLowerCase() : number;
}

function compareCells(one, other) {
  if (typeof one === typeof other) return one < other ? -1 : Number(one > other);
  return typeof one === "number" ? -1 : 1; // numbers before texts
}

function sortTable(heading) {
  const body = heading.closest("table").tBodies[0];
  const ascending = heading.getAttribute("aria-sort") !== "ascending";
  const rows = [...body.rows].sort((a, b) => {
    const order = compareCells(readCell(a, heading.cellIndex), readCell(b, heading.cellIndex));
    return ascending ? order : -order;
  });
  for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  body.append(...rows);
}

for (const heading of document.querySelectorAll("article table thead th")) {
  heading.tabIndex = 0;
  heading.style.cursor = "pointer";
  heading.title = "Sort by this column";
  heading.addEventListener("click", () => sortTable(heading));
  heading.addEventListener("keydown", (event) => {
    if (event.key === "Enter") sortTable(heading);
  });
}

// A table with long texts becomes a block for each row on a narrow screen (site.css), where cells name their columns.
for (const table of document.querySelectorAll("article table")) {
  const headings = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
  const cells = [...table.tBodies[0].rows].flatMap((row) => [...row.cells]);
  for (const cell of cells) {
    cell.dataset.label = headings[cell.cellIndex];
    cell.classList.toggle("long", cell.textContent.length > 60);
  }
  table.classList.toggle("blocks", table.querySelector(".long") !== null);
}
