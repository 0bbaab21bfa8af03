"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const tokens = data.tokens, count = tokens.length;
const LEVELS_PER_NAT = 1000, LAST_LEVEL = 65534, THUMB = 96;
const RAMPS = {
  light: ["#fbfdff", "#cfe1f2", "#93c3df", "#4a97c9", "#1764ab", "#08306b"],
  dark: ["#10141c", "#1d3a66", "#2a63a3", "#4b93cf", "#8fc4ea", "#f1f8ff"],
};
const TICKS = {linear: [0, 0.25, 0.5, 0.75, 1], root: [0, 0.01, 0.1, 0.25, 0.5, 1], log: [0.0001, 0.001, 0.01, 0.1, 1]};
const SCALES = {
  linear: weight => weight,
  root: weight => Math.sqrt(weight),
  log: weight => weight <= 1e-4 ? 0 : 1 + Math.log10(weight) / 4,
};
const withHeads = data.layers.filter(layer => layer.levels);
const state = {layer: withHeads[0], head: 0, query: count - 1, key: count - 1, cell: 0, shown: null};
const $ = id => document.getElementById(id);
const darkScheme = matchMedia("(prefers-color-scheme: dark)");

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// --- numbers ---------------------------------------------------------------------------------------------------------

function bytes(text) {
  return Uint8Array.from(atob(text), character => character.charCodeAt(0)).buffer;
}

function decode(layer, head) {
  if (!layer.offsets) {  // where each query's keys begin among the levels
    let next = 0;
    layer.offsets = layer.first.map((first, query) => {
      const begin = next;
      next += query - first + 1;
      return begin;
    });
  }
  const levels = new Uint16Array(bytes(layer.levels[head])), sums = new Float32Array(bytes(layer.sums[head]));
  const level = (query, key) => levels[layer.offsets[query] + key - layer.first[query]];
  return {
    visible: (query, key) => key >= layer.first[query] && key <= query,
    weight: (query, key) => Math.exp(-level(query, key) / LEVELS_PER_NAT),
    score: (query, key) => sums[query] - level(query, key) / LEVELS_PER_NAT,
    smallest: (query, key) => level(query, key) === LAST_LEVEL,
  };
}

function spell(number) {
  if (number === null) return "not finite";
  const size = Math.abs(number);
  if (!size) return "0";
  return size < 1e-3 || size >= 1e5 ? number.toExponential(2) : number.toPrecision(4);
}

// --- colours ---------------------------------------------------------------------------------------------------------

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : darkScheme.matches;
}

let colours = [];
function mixColours() {
  const ramp = RAMPS[isDark() ? "dark" : "light"].map(text => [1, 3, 5].map(at => parseInt(text.slice(at, at + 2), 16)));
  colours = Array.from({length: 256}, (_, place) => {
    const at = place / 255 * (ramp.length - 1), low = Math.min(Math.floor(at), ramp.length - 2);
    return ramp[low].map((channel, index) => Math.round(channel + (ramp[low + 1][index] - channel) * (at - low)));
  });
}

function colour(share) {
  return colours[Math.round(Math.min(Math.max(share, 0), 1) * 255)];
}

function paint(node, share) {
  const [red, green, blue] = colour(share);
  node.style.background = `rgb(${red} ${green} ${blue})`;
  node.style.color = 0.3 * red + 0.59 * green + 0.11 * blue > 140 ? "#111" : "#fff";
}

// The weights as an image of `size` pixels a side; where several cells share a pixel, the largest is seen.
function draw(canvas, head, size) {
  const scale = SCALES[$("scale").value], largest = new Float32Array(size * size).fill(-1);
  for (let query = 0; query < count; query++) {
    const row = Math.floor(query * size / count) * size;
    for (let key = 0; key <= query; key++) {
      if (!head.visible(query, key)) continue;
      const pixel = row + Math.floor(key * size / count);
      largest[pixel] = Math.max(largest[pixel], head.weight(query, key));
    }
  }
  const image = new ImageData(size, size);
  largest.forEach((weight, pixel) => {
    if (weight >= 0) image.data.set([...colour(scale(weight)), 255], 4 * pixel);
  });
  canvas.width = canvas.height = size;
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// --- overview and controls -------------------------------------------------------------------------------------------

function buildOverview() {
  const heads = Math.max(...withHeads.map(layer => layer.levels.length));
  const thumbs = $("thumbs");
  thumbs.style.gridTemplateColumns = `auto repeat(${heads}, minmax(24px, 92px))`;
  thumbs.append(element("span", {className: "name"}));
  for (let head = 0; head < heads; head++) thumbs.append(element("span", {className: "name", textContent: head}));
  for (const layer of data.layers) {
    thumbs.append(element("span", {className: "name", textContent: layer.layer}));
    if (!layer.levels) thumbs.append(element("span", {className: "none", textContent: "no attention"}));
    else layer.buttons = layer.levels.map((_, head) => {
      const name = `Layer ${layer.layer}, head ${head}`, button = element("button", {type: "button", title: name});
      button.setAttribute("aria-label", name);
      button.append(element("canvas"));
      button.onclick = () => choose(layer, head);
      return button;
    });
    if (layer.buttons) thumbs.append(...layer.buttons);
  }
}

function drawOverview() {
  for (const layer of withHeads) setTimeout(() => {  // a layer at a time: the page answers in between
    layer.buttons.forEach((button, head) => {
      draw(button.firstChild, decode(layer, head), Math.min(count, THUMB));
      button.firstChild.style.imageRendering = count < 40 ? "pixelated" : "auto";
    });
  });
}

function choose(layer, head) {
  state.layer = layer;
  state.head = Math.min(head, layer.levels.length - 1);
  state.shown = decode(layer, state.head);
  $("layer").value = layer.layer;
  $("head").replaceChildren(...layer.levels.map((_, number) => element("option", {value: number, textContent: number})));
  $("head").value = state.head;
  $("detail-title").textContent = `Layer ${layer.layer}, head ${state.head} (${layer.kind})`;
  for (const other of withHeads) other.buttons.forEach((button, number) =>
    button.setAttribute("aria-pressed", other === layer && number === state.head));
  drawMap();
  drawMemory();
}

// --- the heat map ----------------------------------------------------------------------------------------------------

function drawMap() {
  draw($("cells"), state.shown, count);
  const borders = [], segments = state.layer.segments || [];
  for (let token = 1; token < count; token++) {
    if (segments[token] === segments[token - 1]) continue;
    const at = `${100 * token / count}%`, row = element("i"), column = element("i");
    Object.assign(row.style, {top: at, left: 0, right: 0, height: "1px"});
    Object.assign(column.style, {left: at, top: 0, bottom: 0, width: "1px"});
    borders.push(row, column);
  }
  $("borders").replaceChildren(...borders);
  const bar = element("div"), legend = element("div", {className: "bar"}, bar), scale = SCALES[$("scale").value];
  const stops = Array.from({length: 11}, (_, place) => `rgb(${colour(place / 10).join(" ")}) ${10 * place}%`);
  bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  for (const tick of TICKS[$("scale").value]) {
    const label = element("span", {textContent: tick});
    label.style.left = `${100 * scale(tick)}%`;
    legend.append(label);
  }
  $("legend").replaceChildren(element("span", {textContent: "weight"}), legend);
  drawSentence();
}

function fittingCell() {
  const gutter = $("rows").offsetWidth, room = $("detail").clientWidth - gutter - 4;
  const high = Math.max(0.86 * innerHeight - gutter, 300);
  return Math.min(Math.max(Math.floor(Math.min(room, high) / count), 2), 40);
}

function zoom(cell) {
  state.cell = cell;
  $("zoom").value = cell;
  $("cell").textContent = `${cell} px`;
  const side = `${cell * count}px`;
  Object.assign($("plane").style, {width: side, height: side});
  const step = Math.ceil(14 / cell);  // a label needs the height of a line
  for (const [id, from, size] of [["columns", "left", "width"], ["rows", "top", "height"]]) {
    const labels = [];
    for (let token = Math.floor(step / 2); token < count; token += step) {
      if (step === 1 || cell * (count - token - 0.5) >= 7) labels.push(label(token, from, size));
    }
    $(id).replaceChildren(...labels);
  }
  drawCursor();
}

function label(token, from, size, extra = "") {
  const made = element("span", {textContent: tokens[token], className: extra});
  const thick = Math.max(state.cell, 14);
  const begin = Math.max(0, Math.min(state.cell * (token + 0.5) - thick / 2, state.cell * count - thick));
  Object.assign(made.style, {[from]: `${begin}px`, [size]: `${thick}px`, lineHeight: `${thick}px`});
  return made;
}

function drawCursor() {
  const cursor = $("cursor"), {cell, query, key} = state, side = Math.max(cell, 7);
  const [top, left] = [query, key].map(place => cell * (place + 0.5) - side / 2);
  Object.assign(cursor.style, {top: `${top}px`, left: `${left}px`, width: `${side}px`, height: `${side}px`});
  for (const [id, token, from, size] of [["columns", key, "left", "width"], ["rows", query, "top", "height"]]) {
    $(id).querySelector(".now")?.remove();
    if (!cursor.hidden) $(id).append(label(token, from, size, "now"));
  }
}

function drawSentence() {
  const {query, shown} = state, scale = SCALES[$("scale").value];
  $("sentence-title").textContent = `Where token ${query}, “${tokens[query]}”, looks`;
  $("sentence").replaceChildren(...tokens.flatMap((text, token) => {
    const part = element("span", {textContent: text, title: `token ${token}`});
    if (shown.visible(query, token)) paint(part, scale(shown.weight(query, token)));
    else part.className = "later";
    if (token === query) part.classList.add("query");
    part.onclick = () => moveTo(token, token);
    const wrap = text.startsWith("·") ? [element("wbr")] : [];  // lines break between words
    return text.endsWith("⏎") ? [...wrap, part, element("br")] : [...wrap, part];
  }));
}

function moveTo(query, key) {
  const changed = query !== state.query;
  Object.assign(state, {query, key});
  $("cursor").hidden = false;
  drawCursor();
  if (changed) {
    drawSentence();
    moveMarker(query);
  }
}

function facts() {
  const {query, key, shown, layer, head} = state;
  const found = [["query", `${query} ${tokens[query]}`], ["key", `${key} ${tokens[key]}`]];
  if (key > query) found.push(["weight", "none: the key comes later"]);
  else if (!shown.visible(query, key)) found.push(["weight", "none: out of the query's sight"]);
  else {
    const least = shown.smallest(query, key) ? "at most " : "";
    found.push(["weight", least + spell(shown.weight(query, key))], ["score", least + spell(shown.score(query, key))]);
  }
  if (layer.share) found.push(["memory's share", spell(layer.share[head][query])]);
  return found;
}

function tell(found, x, y) {
  const tip = $("tip");
  tip.replaceChildren(element("dl", {}, ...found.flatMap(([name, value]) =>
    [element("dt", {textContent: name}), element("dd", {textContent: value})])));
  tip.hidden = false;
  tip.style.left = `${Math.max(4, Math.min(x + 16, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? Math.max(4, y - 12 - tip.offsetHeight) : y + 18}px`;
}

function pointed(event) {
  const box = $("plane").getBoundingClientRect();
  const place = offset => Math.max(0, Math.min(count - 1, Math.floor(offset / state.cell)));
  moveTo(place(event.clientY - box.top), place(event.clientX - box.left));
  tell(facts(), event.clientX, event.clientY);
}

function pressed(event) {
  const {query, key} = state, moves = {
    ArrowUp: [query - 1, key], ArrowDown: [query + 1, key], ArrowLeft: [query, key - 1], ArrowRight: [query, key + 1],
    Home: [query, 0], End: [query, query], PageUp: [query - 10, key], PageDown: [query + 10, key],
  };
  if (event.key === "Escape") $("tip").hidden = true;
  if (!moves[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  moveTo(...moves[event.key].map(place => Math.max(0, Math.min(count - 1, place))));
  const map = $("map"), gutter = $("rows").offsetWidth;
  const sides = [[state.query, "scrollTop", "clientHeight"], [state.key, "scrollLeft", "clientWidth"]];
  for (const [place, scroll, size] of sides) {
    const at = place * state.cell, room = map[size] - gutter;
    map[scroll] = Math.min(at, Math.max(map[scroll], at + state.cell - room));
  }
  const box = $("cursor").getBoundingClientRect();
  tell(facts(), box.right, box.bottom);
  $("said").textContent = facts().map(fact => fact.join(" ")).join(", ");
}
