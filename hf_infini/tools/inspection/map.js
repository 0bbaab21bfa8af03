// --- the heat map of a head, and the text in its colours -----------------------------------------

function choose(layer, head) {
  state.layer = layer;
  state.head = head;
  $("layer").value = layer.layer;
  const options = headsAndMean(layer).map((number) =>
    element("option", { value: number, textContent: number === MEAN ? say("mean") : number }),
  );
  $("head").replaceChildren(...options);
  $("head").value = head;
  $("views").hidden = !layer.gate;
  const percent = Number((100 * (Math.exp(data.step / 2) - 1)).toPrecision(2));
  $("keys").textContent =
    `${say(layer.gate ? "memoryKeys" : "keys")} ${say("rounded", percent, tickText(data.floor))}`;
  $("detail-title").textContent = `${headName(layer, head)} (${layer.kind})`;
  for (const other of withHeads)
    for (const button of other.buttons) {
      button.setAttribute("aria-pressed", other === layer && Number(button.value) === head);
    }
  drawFates();
  drawMap();
  drawMemory();
  remember();
}

function drawMap() {
  state.shown = viewOf(state.layer, state.head);
  draw($("cells"), state.shown, count);
  const borders = [],
    segments = state.layer.segments || [];
  for (let token = 1; token < count; token++) {
    if (segments[token] === segments[token - 1]) continue;
    const at = `${(100 * token) / count}%`,
      row = element("i"),
      column = element("i");
    Object.assign(row.style, { top: at, left: 0, right: 0, height: "1px" });
    Object.assign(column.style, { left: at, top: 0, bottom: 0, width: "1px" });
    borders.push(row, column);
  }
  $("borders").replaceChildren(...borders);
  const { top, negative } = state.shown;
  const bars = state.layer.gate
    ? [bar("localBar", "local"), bar("memoryBar", "memory", top)]
    : [bar("bar", "local")];
  if (negative) bars.push(bar("memoryBar", "negative", top, "−"));
  $("legend").replaceChildren(...bars.flat());
  drawSentence();
}

// A line of the legend: what a ramp of colours stands for, from 0 to ±top.
function bar(name, ramp, top = 1, sign = "") {
  const line = element("div"),
    made = element("div", { className: "bar" }, line),
    scale = SCALES[$("scale").value];
  const stops = Array.from(
    { length: 11 },
    (_, step) => `rgb(${colour(step / 10, ramp).join(" ")}) ${10 * step}%`,
  );
  line.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  for (const tick of TICKS[$("scale").value]) {
    const label = element("span", { textContent: tick ? sign + tickText(tick * top) : 0 });
    label.style.left = `${100 * scale(tick)}%`;
    made.append(label);
  }
  return [element("span", { textContent: say(name) }), made];
}

function fittingCell() {
  const gutter = $("rows").offsetWidth,
    room = $("detail").clientWidth - gutter - 4;
  const high = Math.max(0.86 * innerHeight - gutter, 300);
  return Math.min(Math.max(Math.floor(Math.min(room, high) / count), 2), 40);
}

function zoom(cell) {
  state.cell = cell;
  $("zoom").value = cell;
  $("cell").textContent = `${cell} px`;
  const side = `${cell * count}px`;
  Object.assign($("plane").style, { width: side, height: side });
  const step = Math.ceil(14 / cell); // a label needs the height of a line
  for (const [id, from, size] of [
    ["columns", "left", "width"],
    ["rows", "top", "height"],
  ]) {
    const labels = [];
    for (let token = Math.floor(step / 2); token < count; token += step) {
      if (step === 1 || cell * (count - token - 0.5) >= 7) labels.push(label(token, from, size));
    }
    $(id).replaceChildren(...labels);
  }
  drawCursor();
}

function label(token, from, size, extra = "") {
  const made = element("span", { textContent: tokens[token], className: extra });
  const thick = Math.max(state.cell, 14);
  const begin = Math.max(
    0,
    Math.min(state.cell * (token + 0.5) - thick / 2, state.cell * count - thick),
  );
  Object.assign(made.style, {
    [from]: `${begin}px`,
    [size]: `${thick}px`,
    lineHeight: `${thick}px`,
  });
  return made;
}

function drawCursor() {
  const cursor = $("cursor"),
    { cell, query, key } = state,
    side = Math.max(cell, 7);
  const [top, left] = [query, key].map((place) => cell * (place + 0.5) - side / 2);
  Object.assign(cursor.style, {
    top: `${top}px`,
    left: `${left}px`,
    width: `${side}px`,
    height: `${side}px`,
  });
  for (const [id, token, from, size] of [
    ["columns", key, "left", "width"],
    ["rows", query, "top", "height"],
  ]) {
    $(id).querySelector(".now")?.remove();
    if (!cursor.hidden) $(id).append(label(token, from, size, "now"));
  }
}

function drawSentence() {
  const { query, shown } = state;
  $("sentence-title").textContent = say("looks", query, tokens[query]);
  $("sentence").replaceChildren(
    ...textParts((part, token) => {
      const place = query * count + token;
      if (shown.kinds[place] === OUT_OF_SIGHT) part.className = "later";
      else paint(part, weightColour(shown, place));
      if (token === query) part.classList.add("query");
      part.onclick = () => moveTo(token, token);
      part.onpointermove = (event) => {
        if (event.pointerType === "touch") return;
        moveTo(query, token);
        tell(facts(), event.clientX, event.clientY);
      };
      part.onpointerleave = leave;
    }),
  );
}

// The text as elements, one for each token, which `dress(element, token)` gives its looks.
function textParts(dress) {
  return tokens.flatMap((text, token) => {
    const space = text.startsWith("·"),
      part = element("span");
    part.append(...(space ? [element("i", { textContent: "·" }), text.slice(1)] : [text]));
    dress(part, token);
    const wrap = space ? [element("wbr")] : []; // lines break between words
    return text.endsWith("⏎") ? [...wrap, part, element("br")] : [...wrap, part];
  });
}

function moveTo(query, key) {
  const changed = query !== state.query;
  Object.assign(state, { query, key });
  $("cursor").hidden = false;
  drawCursor();
  remember();
  if (changed) {
    drawSentence();
    moveMarker(query);
  }
}

function facts() {
  const { query, key, shown, layer, head } = state,
    place = query * count + key,
    weight = shown.before[place];
  const mean = (rows) =>
    head === MEAN
      ? rows.reduce((sum, row) => sum + row[query], 0) / rows.length
      : rows[head][query];
  const found = [
    [say("query"), `${query} ${tokens[query]}`],
    [say("key"), `${key} ${tokens[key]}`],
  ];
  if (shown.kinds[place] === OUT_OF_SIGHT)
    found.push([say("weight"), say(key > query ? "later" : "outOfSight")]);
  else if (shown.kinds[place] === LOCAL) {
    found.push([say(layer.gate ? "localWeight" : "weight"), spellWeight(weight)]);
  } else
    found.push([
      say(shown.kinds[place] === MIXED ? "weight" : "memoryWeight"),
      spellWeight(weight),
    ]);
  if (layer.gate) {
    if (shown.kinds[place] !== OUT_OF_SIGHT)
      found.push([say("inOutput"), spellWeight(shown.output[place])]);
    found.push(
      [say("gate"), spell(mean(layer.tokenGate))],
      [say("share"), spell(mean(layer.share))],
    );
  }
  return found;
}

function tell(found, x, y) {
  const tip = $("tip");
  tip.replaceChildren(
    element(
      "dl",
      {},
      ...found.flatMap(([name, value]) => [
        element("dt", { textContent: name }),
        element("dd", { textContent: value }),
      ]),
    ),
  );
  tip.hidden = false;
  tip.style.left = `${Math.max(4, Math.min(x + 16, innerWidth - tip.offsetWidth - 8))}px`;
  const height = tip.offsetHeight;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - 12 - height) : y + 18}px`;
}

function pointed(event) {
  const box = $("plane").getBoundingClientRect();
  const place = (offset) => Math.max(0, Math.min(count - 1, Math.floor(offset / state.cell)));
  moveTo(place(event.clientY - box.top), place(event.clientX - box.left));
  tell(facts(), event.clientX, event.clientY);
}

function pressed(event) {
  const { query, key } = state,
    moves = {
      ArrowUp: [query - 1, key],
      ArrowDown: [query + 1, key],
      ArrowLeft: [query, key - 1],
      ArrowRight: [query, key + 1],
      Home: [query, 0],
      End: [query, query],
      PageUp: [query - 10, key],
      PageDown: [query + 10, key],
    };
  if (event.key === "Escape") hideTip();
  if (!moves[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  moveTo(...moves[event.key].map((place) => Math.max(0, Math.min(count - 1, place))));
  scrollToCursor();
  const box = $("cursor").getBoundingClientRect();
  tell(facts(), box.right, box.bottom);
  $("said").textContent = facts()
    .map((fact) => fact.join(" "))
    .join(", ");
}

function scrollToCursor() {
  const map = $("map"),
    gutter = $("rows").offsetWidth;
  const sides = [
    [state.query, "scrollTop", "clientHeight"],
    [state.key, "scrollLeft", "clientWidth"],
  ];
  for (const [place, scroll, size] of sides) {
    const at = place * state.cell,
      room = map[size] - gutter;
    map[scroll] = Math.min(at, Math.max(map[scroll], at + state.cell - room));
  }
}

function hideTip() {
  $("tip").hidden = true;
}

function leave(event) {
  // a finger that was lifted leaves its tip to be read
  if (event.pointerType !== "touch") hideTip();
}
