// --- the memory ------------------------------------------------------------------------------------------------------

let moveMarker = () => {};  // to another query, on the chart that has one

function drawMemory() {
  const {layer, head} = state, infini = withHeads.filter(other => other.gate);
  $("memory").hidden = !infini.length;
  if (!infini.length) return;
  $("memory-title").textContent = layer.gate ? `Memory of layer ${layer.layer}` : `Layer ${layer.layer} has no memory`;
  const charts = [], read = layer.gate && layer.share.flat().some(share => share > 0);
  const unread = "The text ends before any of it leaves the local window: no token reads a memory.";
  const headName = `head ${head} coloured, the layer's others grey`;
  if (read) {
    const segmentNames = layer.memory[head].map((_, place) => place);
    segmentNames[segmentNames.length - 1] = "end";
    charts.push(chart({
      title: "Memory's share of each token's output", rows: layer.share, top: 1, marked: true, axis: "token",
      note: `‖g · memory‖ / (‖g · memory‖ + ‖(1 − g) · local‖): ${headName}`,
      names: tokens.map((_, place) => place), point: place => { moveTo(place, place); return facts(); },
    }));
    for (const [name, symbol, rows] of [["memory", "‖M‖", layer.memory], ["normaliser", "‖z‖", layer.normaliser]]) {
      charts.push(chart({
        title: `Norm of the ${name} as each segment reads it`, rows, axis: "segment", names: segmentNames,
        note: `${symbol}: ${headName}; “end” is after the text`,
        point: place =>
          [["segment", segmentNames[place]], ...rows.map((row, number) => [`head ${number}`, spell(row[place])])],
      }));
    }
  }
  $("charts").replaceChildren(...charts.map(([figure]) => figure));
  if (layer.gate && !read) $("charts").append(element("p", {textContent: unread}));
  charts.forEach(([, drawLines]) => drawLines());  // their width is known only on the page
  const mean = row => {
    const reading = row.filter(share => share > 0);
    return reading.length ? reading.reduce((sum, share) => sum + share, 0) / reading.length : null;
  };
  const rows = values => infini.map(other => [other.layer, values(other), other === layer]);
  const tables = [
    table("Gate", "sigmoid(β): the weight of the memory, the rest is local", "layer", rows(other => other.gate), true),
    table("Mean share of the memory", "over the tokens that read one", "layer",
      rows(other => other.share.map(mean)), true),
  ];
  if (read) for (const [name, norms] of [["‖M‖", layer.memory], ["‖z‖", layer.normaliser]]) {
    const lines = norms[head].map((_, place) => [place, norms.map(row => row[place]), false]);
    lines.at(-1)[0] = "end";
    const figure = table(`${name} in numbers`, `layer ${layer.layer}, as each segment reads it`, "segment", lines, false);
    tables.push(element("details", {}, element("summary", {textContent: `${name} in numbers`}), figure));
  }
  $("tables").replaceChildren(...tables);
}

function chart({title, note, rows, names, point, axis, marked = false, top = null}) {
  const svg = shape("svg", {role: "img", "aria-label": `${title}, a line for each head`}), last = names.length - 1;
  const figure = element("figure");
  figure.append(element("figcaption", {}, title, element("small", {textContent: note})), svg);
  const high = top ?? roundUp(Math.max(...rows.flat().filter(value => value !== null)));
  const left = 52, right = 14, up = 8, bottom = 176;
  const across = place => left + (last ? place / last : 0.5) * (svg.clientWidth - left - right);
  const down = value => bottom - value / high * (bottom - up);

  function drawLines() {
    for (const part of [0, 0.5, 1]) {
      const y = down(part * high);
      svg.append(shape("line", {x1: left, x2: svg.clientWidth - right, y1: y, y2: y}),
        shape("text", {x: left - 8, y: y + 4, "text-anchor": "end"}, part ? String(part * high) : "0"));
    }
    const ticks = Math.max(1, Math.ceil(names.length / Math.floor((svg.clientWidth - left) / 60)));
    names.forEach((name, place) => {
      const shown = place % ticks === 0 && (place === last || last - place >= ticks) || place === last;
      if (shown) svg.append(shape("text", {x: across(place), y: bottom + 18, "text-anchor": "middle"}, name));
    });
    svg.append(shape("text", {x: (left + svg.clientWidth - right) / 2, y: bottom + 34, "text-anchor": "middle"}, axis));
    const order = rows.map((_, number) => number).filter(number => number !== state.head);
    for (const number of [...order, state.head]) {  // the chosen head over the others
      let path = "", pen = "M";
      rows[number].forEach((value, place) => {
        if (value === null) pen = "M";
        else {
          path += `${pen}${across(place).toFixed(1)} ${down(value).toFixed(1)}`;
          pen = "L";
        }
      });
      svg.append(shape("path", {d: path, class: number === state.head ? "chosen" : "", "stroke-linecap": "round"}));
    }
    if (!marked) return;
    const marker = shape("line", {y1: up, y2: bottom, class: "now"});
    svg.append(marker);
    moveMarker = place => ["x1", "x2"].forEach(name => marker.setAttribute(name, across(place)));
    moveMarker(state.query);
  }

  svg.onpointermove = svg.onpointerdown = event => {
    const box = svg.getBoundingClientRect();
    const place = Math.round((event.clientX - box.left - left) / (svg.clientWidth - left - right) * last);
    tell(point(Math.max(0, Math.min(last, place))), event.clientX, event.clientY);
  };
  svg.onpointerleave = leave;
  return [figure, drawLines];
}

// A number at least as large that is short to write, and its half too.
function roundUp(number) {
  if (!(number > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(number));
  return Number(([1, 2, 3, 4, 5, 6, 8, 10].find(digit => digit * power >= number) * power).toPrecision(2));
}

function shape(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// `rows`: name, a value per head, and whether it is the chosen layer's; `shaded`: values from 0 to 1, seen as colours too.
function table(title, note, corner, rows, shaded) {
  const heads = Math.max(...rows.map(([, values]) => values.length));
  const top = element("tr", {}, element("th", {textContent: `${corner} / head`}));
  for (let head = 0; head < heads; head++) top.append(element("th", {textContent: head, scope: "col"}));
  const body = rows.map(([name, values, chosen]) => element("tr", {}, element("th", {textContent: name, scope: "row"}),
    ...values.map((value, head) => {
      const text = value === null ? "–" : shaded ? value.toFixed(3) : spell(value);
      const cell = element("td", {textContent: text, className: chosen && head === state.head ? "chosen" : ""});
      if (shaded && value !== null) paint(cell, value);
      return cell;
    })));
  return element("figure", {}, element("figcaption", {}, title, element("small", {textContent: note})),
    element("div", {className: "scroll", tabIndex: 0}, element("table", {}, element("thead", {}, top),
      element("tbody", {}, ...body))));
}

// --- events and start ------------------------------------------------------------------------------------------------

function hideTip() {
  $("tip").hidden = true;
}

function leave(event) {
  if (event.pointerType !== "touch") hideTip();  // a finger that was lifted leaves its tip to be read
}

function repaint() {
  mixColours();
  $("theme").textContent = isDark() ? "Light" : "Dark";
  drawOverview();
  drawMap();
  drawMemory();
}

function start() {
  const kinds = [...new Set(data.layers.map(layer => layer.kind))].join(", ");
  $("title").textContent = `Attention heads of ${data.title}`;
  const numbers = data.layers.map(layer => layer.layer), unbroken = numbers.length > 2 &&
    numbers.at(-1) - numbers[0] === numbers.length - 1;
  const layers = unbroken ? `${numbers[0]} to ${numbers.at(-1)}` : numbers.join(", ");
  $("summary").textContent = `Tokens: ${count} · layers: ${layers} · attention: ${kinds}`;
  $("layer").append(...withHeads.map(layer => element("option", {value: layer.layer, textContent: layer.layer})));
  $("layer").onchange = event => choose(withHeads.find(layer => layer.layer === Number(event.target.value)), state.head);
  $("head").onchange = event => choose(state.layer, Number(event.target.value));
  $("scale").onchange = repaint;
  $("zoom").oninput = event => zoom(Number(event.target.value));
  $("fit").onclick = () => zoom(fittingCell());
  $("controls").onsubmit = event => event.preventDefault();
  $("plane").onpointermove = $("plane").onpointerdown = pointed;
  $("plane").onpointerleave = leave;
  $("map").onkeydown = pressed;
  $("map").onblur = hideTip;
  addEventListener("pointerdown", hideTip, true);  // before what it points at shows its own
  for (const event of ["wheel", "pointercancel"]) addEventListener(event, hideTip, {passive: true});
  $("theme").onclick = () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    repaint();
  };
  darkScheme.onchange = repaint;
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;  // a phone's address bar coming and going is no reason to draw
    width = innerWidth;
    zoom(fittingCell());
    drawMemory();
  });
  mixColours();
  $("theme").textContent = isDark() ? "Light" : "Dark";
  buildOverview();
  choose(withHeads[0], 0);
  zoom(fittingCell());
  drawOverview();
}

start();
