"use strict";
// Fills the view of `headwise inspect`. Text from the data is always inserted as text (textContent), never as markup.
(() => {
  const root = document.getElementById("inspection");
  const data = JSON.parse(document.getElementById("inspection-data").textContent);
  const state = { layer: 0, head: 0, sentence: 0, measure: Object.keys(data.measures)[0], token: -1 };

  // One scale for all pages: costs by steps, similarities and attention as shares of their largest possible value.
  const STEPS = [0.001, 0.003, 0.01, 0.03];
  const SHADES = [6, 22, 45, 70, 100];
  const shade = (cost) => SHADES[STEPS.filter((step) => cost >= step).length];
  const make = (tag, kind, text) => {
    const element = document.createElement(tag);
    if (kind) element.className = kind;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  // zero has no sign
  const number = (value, digits) => value.toFixed(digits).replace(/^-(?=[0.]*$)/, "").replace("-", "\u2212");
  const signed = (value) => (value < 0 ? "" : "+") + number(value, 4);
  const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

  const weights = () => {
    const sentence = data.sentences[state.sentence];
    const packed = sentence && sentence.weights[state.layer];
    if (!packed) return null;
    const size = sentence.tokens.length;
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    // one query a token, or one for the sentence
    const queries = bytes.length / (data.layers[state.layer].heads * size);
    return { queries, of: (query, key) => bytes[(state.head * queries + query) * size + key] / 255 };
  };

  const pick = (name, label, options) => {
    const select = make("select");
    select.id = `pick-${name}`;
    options.forEach(([value, text]) => {
      const option = make("option", "", text);
      option.value = value;
      select.append(option);
    });
    select.addEventListener("change", () => {
      state[name] = name === "measure" ? select.value : Number(select.value);
      if (name === "layer" || name === "sentence") state.token = -1;
      draw();
    });
    const box = make("label", "", label);
    box.append(select);
    return box;
  };

  const panel = (title, said) => {
    const box = make("div");
    box.append(make("h3", "", title), make("p", "said", said));
    return box;
  };

  const choose = (layer, head, kind) => {
    Object.assign(state, { layer, head, token: layer === state.layer ? state.token : -1 });
    draw();
    document.querySelector(`#inspection ${kind}[data-layer="${layer}"][data-head="${head}"]`).focus();
  };

  function map() {
    const all = data.layers.flatMap((layer) => layer.drops.map((drop) => drop[0]));
    if (!all.length) return null;
    const box = panel("What removing each head costs",
      `A row is a layer, a square is a head; the darker, the more ${data.score} falls without it. Select one to see what it does.`);
    const grid = make("div", "map");
    grid.style.setProperty("--heads", Math.max(...data.layers.map((layer) => layer.heads)));
    data.layers.forEach((layer, place) => {
      const name = make("span", "", layer.name);
      grid.append(name);
      layer.drops.forEach(([value, low, high], head) => {
        const cell = make("button", value < 0 ? "cell helps" : "cell");
        cell.type = "button";
        cell.dataset.layer = place;
        cell.dataset.head = head;
        cell.title = `layer ${layer.name}, head ${head}: ${signed(value)} (${signed(low)} to ${signed(high)})`;
        cell.setAttribute("aria-label", cell.title);
        cell.setAttribute("aria-current", String(place === state.layer && head === state.head));
        cell.style.setProperty("--share", `${shade(Math.abs(value))}%`);
        cell.addEventListener("click", () => choose(place, head, ".cell"));
        grid.append(cell);
      });
    });
    const key = make("p", "key");
    const entry = (kind, share, text) => {
      const square = make("i", kind);
      square.style.setProperty("--share", `${share}%`);
      const both = make("span");
      both.append(square, text);
      key.append(both);
    };
    SHADES.forEach((share, step) => entry("cell", share, step === 0 ? `less than ${STEPS[0]}`
      : step === STEPS.length ? `${STEPS[step - 1]} or more` : `${STEPS[step - 1]} to ${STEPS[step]}`));
    if (all.some((value) => value < 0)) entry("cell helps", 45, "removing it helps");
    box.append(grid, key);
    return box;
  }

  function tokens() {
    const sentence = data.sentences[state.sentence];
    const read = weights();
    if (!sentence) return make("p", "said", "No sentences were saved.");
    if (!read) return panel("Attention", "The attention weights of this layer cannot be read.");
    const size = sentence.tokens.length;
    const pooled = read.queries !== size;
    const queries = [...Array(read.queries).keys()];
    const shares = sentence.tokens.map((_, key) => state.token < 0
      ? queries.reduce((sum, query) => sum + read.of(query, key), 0) / read.queries : read.of(state.token, key));
    const largest = Math.max(...shares, 1e-9);
    const from = pooled ? "the single query of the sentence attends"
      : state.token < 0 ? "all tokens together attend" : `\u201c${sentence.tokens[state.token]}\u201d attends`;
    const box = panel("Attention",
      `Where ${from} in head ${state.head}: the darkest token gets ${percent(largest)}.` +
      (pooled ? "" : " Select a token to see its row; select it again for all."));
    const line = make("div", "tokens");
    sentence.tokens.forEach((token, place) => {
      const button = make(pooled ? "span" : "button", "token", token);
      button.title = percent(shares[place]);
      button.style.setProperty("--share", `${Math.round(80 * Math.sqrt(shares[place]))}%`);
      line.append(button);
      if (pooled) return;
      button.type = "button";
      button.setAttribute("aria-pressed", String(place === state.token));
      button.setAttribute("aria-label", `${token}, ${percent(shares[place])}`);
      button.addEventListener("click", () => {
        state.token = place === state.token ? -1 : place;
        draw();
        document.querySelectorAll("#inspection .token")[place].focus();
      });
    });
    box.append(line);
    return box;
  }

  function matrix(layer) {
    const label = data.measures[state.measure];
    const values = layer.pairs[state.measure];
    // under grouped queries keys and values have fewer heads, each read by several
    const shared = values && values.length < layer.heads;
    const box = panel(`Similarity of ${shared ? "key/value heads" : "heads"}`, values ? `${label}, layer ${layer.name}.` : `${label} was not measured in this layer.`);
    if (!values) return box;
    const picked = Math.floor(state.head * values.length / layer.heads);
    const far = state.measure.endsWith("distance")
      ? Math.max(...data.layers.flatMap((one) => (one.pairs[state.measure] || []).flat())) : 1;
    const largest = state.measure === "attention_js" ? Math.LN2 : far || 1;
    const table = make("table", "matrix");
    const header = make("tr");
    header.append(make("th"));
    values.forEach((_, head) => header.append(make("th", "", String(head))));
    table.append(header);
    values.forEach((row, i) => {
      const line = make("tr");
      line.append(make("th", "", String(i)));
      row.forEach((value, j) => {
        const cell = make("td", i === picked || j === picked ? "picked" : "", i === j ? "" : number(value, 2));
        cell.style.setProperty("--share", `${i === j ? 0 : Math.min(85, Math.round(85 * Math.abs(value) / largest))}%`);
        cell.style.setProperty("--tone", value < 0 ? "var(--cold)" : "var(--heat)");
        line.append(cell);
      });
      table.append(line);
    });
    const scroll = make("div", "scroll");
    scroll.tabIndex = 0;
    scroll.append(table);
    box.append(scroll);
    return box;
  }

  function bars(rows, low, high) {
    const box = make("div", "bars");
    const place = (value) => 100 * (value - low) / ((high - low) || 1);
    rows.forEach((row) => {
      const line = make(row.head === undefined ? "div" : "button");
      if (row.head !== undefined) {
        line.type = "button";
        line.dataset.layer = state.layer;
        line.dataset.head = row.head;
        line.setAttribute("aria-current", String(row.head === state.head));
        line.addEventListener("click", () => choose(state.layer, row.head, ".bars button"));
      }
      const track = make("span", "track");
      const bar = make("i", row.value < 0 ? "bar least" : "bar");
      const ends = [place(Math.min(0, row.value)), place(Math.max(0, row.value))];
      bar.style.left = `${ends[0]}%`;
      bar.style.width = `${ends[1] - ends[0]}%`;
      track.append(bar);
      if (row.interval) {
        const span = make("i", "interval");
        span.style.left = `${place(row.interval[0])}%`;
        span.style.width = `${place(row.interval[1]) - place(row.interval[0])}%`;
        track.append(span);
      }
      const mark = make("i", row.chance === undefined ? "zero" : "chance");
      mark.style.left = `${place(row.chance === undefined ? 0 : row.chance)}%`;
      track.append(mark);
      line.append(make("span", "", row.name), track, make("span", "", row.text));
      box.append(line);
    });
    return box;
  }

  function ablation(layer) {
    const none = !layer.drops.length;
    const box = panel(`Cost of removing each head of layer ${layer.name}`,
      none ? "No head was removed (no score was given)." : `Drop in ${data.score} without the head, with its 95 % interval; orange if removal helps.`);
    if (none) return box;
    const all = data.layers.flatMap((one) => one.drops.flatMap((drop) => drop));
    const rows = layer.drops.map(([value, low, high], head) =>
      ({ name: `head ${head}`, value, interval: [low, high], head, text: signed(value) }));
    box.append(bars(rows, Math.min(0, ...all), Math.max(0, ...all)));
    return box;
  }

  function roles(layer) {
    if (!data.roles.length) return null;
    const box = panel(`Roles of head ${state.head}`,
      layer.roles.length ? "Share of its attention on the pairs of each role; the line marks an equally sparse random mask."
        : "Roles were not measured in this layer.");
    if (!layer.roles.length) return box;
    box.append(bars(data.roles.map((name, role) => {
      const value = layer.roles[role][state.head];
      const chance = layer.chance[role];
      return { name, value, chance, text: `${percent(value)} (${percent(chance)})` };
    }), 0, 1));
    return box;
  }

  function draw() {
    const layer = data.layers[state.layer];
    state.head = Math.min(state.head, layer.heads - 1);
    const picks = make("div", "picks");
    picks.append(
      pick("layer", "layer", data.layers.map((one, place) => [place, one.name])),
      pick("head", "head", [...Array(layer.heads).keys()].map((head) => [head, String(head)])),
      pick("measure", "similarity", Object.entries(data.measures)));
    if (data.sentences.length) {
      picks.append(pick("sentence", "sentence", data.sentences.map((one, place) => [place, `${place + 1}. ${one.text}`])));
    }
    ["layer", "head", "sentence", "measure"].forEach((name) => {
      const select = picks.querySelector(`#pick-${name}`);
      if (select) select.value = state[name];
    });
    const focused = document.activeElement && document.activeElement.id;
    const panels = make("div", "panels");
    panels.append(...[matrix(layer), ablation(layer), roles(layer)].filter(Boolean));
    root.replaceChildren(...[map(), picks, tokens(), panels].filter(Boolean));
    if (focused && document.getElementById(focused)) document.getElementById(focused).focus();
  }

  draw();
})();
