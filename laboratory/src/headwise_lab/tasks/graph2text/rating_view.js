"use strict";
// Fills the form of `headwise rate`. Text from the data is always inserted as text (textContent), never as markup.
(() => {
  const root = document.getElementById("rating");
  const data = JSON.parse(document.getElementById("rating-data").textContent);
  const place = `headwise-rating-${data.set}`;
  const state = { item: 0, rater: "", answers: {} };

  const make = (tag, kind, text) => {
    const element = document.createElement(tag);
    if (kind) element.className = kind;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // a page opened from a disk may have no storage: the form then works without
  const keep = () => {
    try { localStorage.setItem(place, JSON.stringify(state)); } catch (error) { /* saved by the button alone */ }
  };
  try { Object.assign(state, JSON.parse(localStorage.getItem(place) || "{}")); } catch (error) { /* begin anew */ }

  const answered = (item) => data.criteria.every(([name]) => (state.answers[item.id] || {})[name]);
  const done = () => data.items.filter(answered).length;

  const choice = (item, [name, question]) => {
    const box = make("fieldset");
    box.append(make("legend", "", question));
    [["A", "A is better"], ["tie", "no difference"], ["B", "B is better"]].forEach(([value, text]) => {
      const label = make("label", "", text);
      const input = make("input");
      input.type = "radio";
      input.name = name;
      input.value = value;
      input.checked = (state.answers[item.id] || {})[name] === value;
      input.addEventListener("change", () => {
        state.answers[item.id] = { ...state.answers[item.id], [name]: value };
        keep();
        progress();
      });
      label.prepend(input);
      box.append(label);
    });
    return box;
  };

  const text = (title, body) => {
    const box = make("div", "text");
    box.append(make("h3", "", title), make("p", "", body));
    return box;
  };

  const listed = (title, lines) => {
    const box = make("div", "text");
    const list = make("ul");
    lines.forEach((line) => list.append(make("li", "", line)));
    box.append(make("h3", "", title), list);
    return box;
  };

  const said = make("p", "said");
  said.setAttribute("role", "status");
  const progress = () => {
    said.textContent = `${done()} of ${data.items.length} texts rated`;
  };

  const button = (name, words, act) => {
    const made = make("button", "", words);
    made.type = "button";
    made.id = name;
    made.addEventListener("click", act);
    return made;
  };

  const go = (step) => {
    state.item = Math.min(data.items.length - 1, Math.max(0, state.item + step));
    keep();
    draw();
  };

  const save = () => {
    if (!state.rater.trim()) {
      said.textContent = "Enter your name or initials first.";
      document.getElementById("rater").focus();
      return;
    }
    const answers = data.items.filter((item) => state.answers[item.id])
      .map((item) => ({ item: item.id, ...state.answers[item.id] }));
    const content = JSON.stringify({ set: data.set, rater: state.rater.trim(), answers }, null, 1);
    const link = make("a");
    link.href = URL.createObjectURL(new Blob([content], { type: "application/json" }));
    link.download = `ratings-${state.rater.trim().replace(/[^\p{L}\p{N}]+/gu, "_")}.json`;
    link.click();
    URL.revokeObjectURL(link.href);
    said.textContent = `${link.download} saved: ${done()} of ${data.items.length} texts rated`;
  };

  function draw() {
    const item = data.items[state.item];
    const rater = make("input");
    rater.id = "rater";
    rater.value = state.rater;
    rater.addEventListener("input", () => { state.rater = rater.value; keep(); });
    const name = make("label", "rater", "Your name or initials ");
    name.append(rater);
    const graph = make("div", "graph");
    graph.append(listed("Knowledge", item.triples), listed("Entities", item.entities));
    const pair = make("div", "pair");
    pair.append(text("A", item.A), text("B", item.B));
    const form = make("form");
    form.append(...data.criteria.map((criterion) => choice(item, criterion)));
    const moves = make("div", "moves");
    moves.append(
      button("back", "Back", () => go(-1)),
      button("next", "Next", () => go(1)),
      button("save", "Save my ratings", save),
    );
    root.replaceChildren(
      name, make("h2", "", `${state.item + 1} of ${data.items.length}: ${item.title}`),
      pair, form, graph, text("Reference text", item.reference), moves, said,
    );
    progress();
  }
  draw();
})();
