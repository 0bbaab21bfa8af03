// --- the memory ----------------------------------------------------------------------------------

let moveMarker = () => {}; // to another query, on the chart that has one

function drawMemory() {
  const { layer, head } = state,
    infini = withHeads.filter((other) => other.gate);
  $("memory").hidden = !infini.length;
  if (!infini.length) return;
  $("memory-title").textContent = say(layer.gate ? "memoryOf" : "noMemory", layer.layer);
  const charts = [],
    read = layer.gate && layer.share.flat().some((share) => share > 0);
  const coloured = head === MEAN ? say("colouredMean") : say("coloured", head);
  if (read) {
    const segmentNames = layer.memory[0].map((_, place) => place);
    segmentNames[segmentNames.length - 1] = say("end");
    charts.push(
      chart({
        title: say("shareTitle"),
        note: say("shareNote", coloured),
        rows: layer.share,
        top: 1,
        marked: true,
        axis: say("tokenAxis"),
        names: tokens.map((_, place) => place),
        point: (place) => {
          moveTo(place, place);
          return facts();
        },
      }),
    );
    charts.push(
      chart({
        title: say("normTitle"),
        note: say("normNote", coloured),
        rows: layer.memory,
        axis: say("segment"),
        names: segmentNames,
        point: (place) => [
          [say("segment"), segmentNames[place]],
          ...layer.memory.map((row, number) => [`${say("head")} ${number}`, spell(row[place])]),
        ],
      }),
    );
  }
  $("charts").replaceChildren(...charts.map(([figure]) => figure));
  if (layer.gate && !read) $("charts").append(element("p", { textContent: say("unread") }));
  charts.forEach(([, drawLines]) => drawLines()); // their width is known only on the page
  const mean = (row) => meanNumber(row.filter((share) => share > 0));
  const rows = (values) => infini.map((other) => [other.layer, values(other), other === layer]);
  const tables = [
    table(
      say("gateTable"),
      say("gateNote"),
      say("layer"),
      rows((other) => other.gate),
      true,
    ),
    table(
      say("shareTable"),
      say("shareTableNote"),
      say("layer"),
      rows((other) => other.share.map(mean)),
      true,
    ),
  ];
  if (read) {
    const lines = layer.memory[0].map((_, place) => [
        place,
        layer.memory.map((row) => row[place]),
        false,
      ]),
      name = say("numbers");
    lines.at(-1)[0] = say("end");
    const figure = table(name, say("numbersNote", layer.layer), say("segment"), lines, false);
    tables.push(element("details", {}, element("summary", { textContent: name }), figure));
  }
  $("tables").replaceChildren(...tables);
}

function meanNumber(numbers) {
  const finite = numbers.filter((number) => number !== null);
  return finite.length ? finite.reduce((sum, number) => sum + number, 0) / finite.length : null;
}

function chart({ title, note, rows, names, point, axis, marked = false, top = null }) {
  const svg = shape("svg", { role: "img", "aria-label": say("lines", title) }),
    last = names.length - 1;
  const figure = element("figure");
  figure.append(element("figcaption", {}, title, element("small", { textContent: note })), svg);
  const high = top ?? roundUp(Math.max(...rows.flat().filter((value) => value !== null)));
  const left = 52,
    right = 14,
    up = 8,
    bottom = 176;
  const across = (place) => left + (last ? place / last : 0.5) * (svg.clientWidth - left - right);
  const down = (value) => bottom - (value / high) * (bottom - up);

  function drawLines() {
    for (const part of [0, 0.5, 1]) {
      const y = down(part * high);
      svg.append(
        shape("line", { x1: left, x2: svg.clientWidth - right, y1: y, y2: y }),
        shape("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, tickText(part * high)),
      );
    }
    const ticks = Math.max(1, roundUp(names.length / Math.floor((svg.clientWidth - left) / 60)));
    names.forEach((name, place) => {
      const shown =
        (place % ticks === 0 && (place === last || last - place >= ticks)) || place === last;
      if (shown)
        svg.append(
          shape("text", { x: across(place), y: bottom + 18, "text-anchor": "middle" }, name),
        );
    });
    svg.append(
      shape(
        "text",
        { x: (left + svg.clientWidth - right) / 2, y: bottom + 34, "text-anchor": "middle" },
        axis,
      ),
    );
    const chosen =
      state.head === MEAN
        ? names.map((_, place) => meanNumber(rows.map((row) => row[place])))
        : rows[state.head];
    for (const row of [...rows.filter((row) => row !== chosen), chosen]) {
      // the chosen line over the others
      let path = "",
        pen = "M";
      row.forEach((value, place) => {
        if (value === null) pen = "M";
        else {
          path += `${pen}${across(place).toFixed(1)} ${down(value).toFixed(1)}`;
          pen = "L";
        }
      });
      svg.append(
        shape("path", {
          d: path,
          class: row === chosen ? "chosen" : "",
          "stroke-linecap": "round",
        }),
      );
    }
    if (!marked) return;
    const marker = shape("line", { y1: up, y2: bottom, class: "now" });
    svg.append(marker);
    moveMarker = (place) =>
      ["x1", "x2"].forEach((name) => marker.setAttribute(name, across(place)));
    moveMarker(state.query);
  }

  svg.onpointermove = svg.onpointerdown = (event) => {
    const box = svg.getBoundingClientRect();
    const place = Math.round(
      ((event.clientX - box.left - left) / (svg.clientWidth - left - right)) * last,
    );
    tell(point(Math.max(0, Math.min(last, place))), event.clientX, event.clientY);
  };
  svg.onpointerleave = leave;
  return [figure, drawLines];
}

function shape(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// `rows`: name, a value per head, and whether it is the chosen layer's; `shaded`: values from 0 to
// 1, seen as colours too.
function table(title, note, corner, rows, shaded) {
  const heads = Math.max(...rows.map(([, values]) => values.length));
  const top = element("tr", {}, element("th", { textContent: say("corner", corner) }));
  for (let head = 0; head < heads; head++)
    top.append(element("th", { textContent: head, scope: "col" }));
  const body = rows.map(([name, values, chosen]) =>
    element(
      "tr",
      {},
      element("th", { textContent: name, scope: "row" }),
      ...values.map((value, head) => {
        const text = value === null ? "–" : shaded ? value.toFixed(3) : spell(value);
        const cell = element("td", {
          textContent: text,
          className: chosen && head === state.head ? "chosen" : "",
        });
        if (shaded && value !== null) paint(cell, colour(value));
        return cell;
      }),
    ),
  );
  return element(
    "figure",
    {},
    element("figcaption", {}, title, element("small", { textContent: note })),
    element(
      "div",
      { className: "scroll", tabIndex: 0 },
      element("table", {}, element("thead", {}, top), element("tbody", {}, ...body)),
    ),
  );
}
