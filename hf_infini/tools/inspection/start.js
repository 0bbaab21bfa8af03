// --- events, the address, and start --------------------------------------------------------------

// The view is in the address, `#layer=0&head=2&query=17&…`, so that a link brings it back.
function remember() {
  clearTimeout(remember.timer);
  remember.timer = setTimeout(() => {
    // browsers refuse too many changes of an address
    const { layer, head, query, key } = state,
      theme = document.documentElement.dataset.theme;
    const view = {
      layer: layer.layer,
      head: head === MEAN ? "mean" : head,
      query,
      key,
      weights: $("view").value,
      colours: $("scale").value,
      language,
      ...(theme && { theme }),
      ...(state.moment !== null && { moment: state.moment }),
    };
    try {
      history.replaceState(null, "", `#${new URLSearchParams(view)}`);
    } catch {} // a page inside of another one may have no address
  }, 300);
}

function recall() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const oneOf = (name, allowed) => (allowed.includes(asked.get(name)) ? asked.get(name) : null);
  const layer =
    withHeads.find((layer) => String(layer.layer) === asked.get("layer")) || state.layer;
  const heads = headsAndMean(layer).map((head) => (head === MEAN ? "mean" : String(head))),
    head = oneOf("head", heads);
  for (const name of ["query", "key"]) {
    const place = Number(asked.get(name) ?? NaN);
    if (Number.isInteger(place) && place >= 0 && place < count) {
      state[name] = place;
      $("cursor").hidden = false;
    }
  }
  $("view").value = oneOf("weights", ["output", "before"]) || $("view").value;
  $("scale").value = oneOf("colours", Object.keys(SCALES)) || $("scale").value;
  language = oneOf("language", Object.keys(STRINGS)) || language;
  // null: after the text
  state.moment = /^\d+$/.test(asked.get("moment")) ? Number(asked.get("moment")) : null;
  const theme = oneOf("theme", ["light", "dark"]);
  if (theme) document.documentElement.dataset.theme = theme;
  state.layer = layer;
  if (head !== null) state.head = head === "mean" ? MEAN : Number(head);
}

// Everything again: after a change of colours, of what the weights are, or of the language.
function drawPage() {
  mixColours();
  sayAll();
  const kinds = [...new Set(data.layers.map((layer) => layer.kind))].join(", ");
  const numbers = data.layers.map((layer) => layer.layer);
  const unbroken = numbers.length > 2 && numbers.at(-1) - numbers[0] === numbers.length - 1;
  const layers = unbroken ? say("range", numbers[0], numbers.at(-1)) : numbers.join(", ");
  $("title").textContent = document.title = say("title", data.title);
  $("summary").textContent = say("summary", count, layers, kinds);
  $("theme").textContent = say(isDark() ? "light" : "dark");
  buildOverview();
  choose(state.layer, state.head);
  drawOverview();
}

function start() {
  recall();
  $("layer").append(
    ...withHeads.map((layer) =>
      element("option", { value: layer.layer, textContent: layer.layer }),
    ),
  );
  $("layer").onchange = (event) =>
    choose(
      withHeads.find((layer) => layer.layer === Number(event.target.value)),
      state.head,
    );
  $("head").onchange = (event) => choose(state.layer, Number(event.target.value));
  $("scale").onchange = $("view").onchange = drawPage;
  $("moment").oninput = (event) => {
    state.moment =
      Number(event.target.value) === state.layer.fates[0].length - 1
        ? null
        : Number(event.target.value);
    drawFates();
    remember();
  };
  $("zoom").oninput = (event) => zoom(Number(event.target.value));
  $("fit").onclick = () => zoom(fittingCell());
  $("controls").onsubmit = (event) => event.preventDefault();
  $("plane").onpointermove = $("plane").onpointerdown = pointed;
  $("plane").onpointerleave = leave;
  $("map").onkeydown = pressed;
  for (const button of $("steps").querySelectorAll("button")) {
    button.onclick = (event) =>
      pressed({ key: button.value, preventDefault: () => event.preventDefault() });
  }
  $("map").onblur = hideTip;
  addEventListener("pointerdown", hideTip, true); // before what it points at shows its own
  for (const event of ["wheel", "pointercancel"])
    addEventListener(event, hideTip, { passive: true });
  $("theme").onclick = () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    drawPage();
  };
  $("language").onclick = () => {
    language = language === "en" ? "pt" : "en";
    drawPage();
  };
  darkScheme.onchange = drawPage;
  addEventListener("hashchange", () => {
    recall();
    drawPage();
    drawCursor();
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar coming and going is no reason to draw
    width = innerWidth;
    zoom(fittingCell());
    drawMemory();
  });
  drawPage();
  zoom(fittingCell());
  if (!$("cursor").hidden) scrollToCursor();
}

const ready = Promise.all(withHeads.map(unpackLayer)).then(start);
