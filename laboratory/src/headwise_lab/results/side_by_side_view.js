"use strict";
// Fills the page of `headwise show --page`. Text from the data is always inserted as text, never as markup.
(() => {
  const root = document.getElementById("runs");
  const data = JSON.parse(document.getElementById("runs-data").textContent);
  const state = { column: -1, ascending: true, wanted: [] };

  const make = (tag, kind, text) => {
    const element = document.createElement(tag);
    if (kind) element.className = kind;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // rows without a value come last, in either order
  const compare = (one, other) => {
    const a = one.keys[state.column];
    const b = other.keys[state.column];
    if (a === null || b === null) return Number(a === null) - Number(b === null);
    const order = a < b ? -1 : Number(a > b);
    return state.ascending ? order : -order;
  };

  const has = (row) => state.wanted.every((word) => row.text.join(" ").toLowerCase().includes(word));

  const said = make("p", "note");
  said.setAttribute("aria-live", "polite");
  const body = make("tbody");
  const draw = () => {
    const rows = data.rows.filter(has);
    if (state.column >= 0) rows.sort(compare);
    body.replaceChildren(...rows.map((row) => {
      const line = make("tr");
      row.text.forEach((text, place) => {
        const cell = make(place ? "td" : "th", data.columns[place].kind, text);
        if (!place) cell.scope = "row";
        line.append(cell);
      });
      return line;
    }));
    said.textContent = `${rows.length} of ${data.rows.length} rows`;
    headings.forEach((heading, place) => {
      if (place !== state.column) heading.removeAttribute("aria-sort");
      else heading.setAttribute("aria-sort", state.ascending ? "ascending" : "descending");
    });
  };

  const headings = data.columns.map((column, place) => {
    const heading = make("th", column.kind);
    heading.scope = "col";
    const button = make("button", "", column.name);
    button.addEventListener("click", () => {
      state.ascending = place === state.column ? !state.ascending : true;
      state.column = place;
      draw();
    });
    heading.append(button);
    return heading;
  });

  const field = make("input");
  field.type = "search";
  field.id = "filter";
  field.addEventListener("input", () => {
    state.wanted = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    draw();
  });
  const label = make("label", "", "Show rows with ");
  label.append(field);

  const table = make("table");
  const head = make("thead");
  const top = make("tr");
  top.append(...headings);
  head.append(top);
  table.append(head, body);
  const scroll = make("div", "scroll");
  scroll.tabIndex = 0;
  scroll.append(table);
  root.append(label, said, scroll);
  draw();
})();
