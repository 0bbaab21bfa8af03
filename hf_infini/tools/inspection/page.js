const data = JSON.parse(document.getElementById("data").textContent);
const tokens = data.tokens,
  count = tokens.length;
const THUMB = 96,
  MEAN = -1; // a thumbnail's pixels; the number that stands for the mean over a layer's heads
const OUT_OF_SIGHT = 0,
  LOCAL = 1,
  MEMORY = 2,
  MIXED = 3; // what a query sees a key through, the last in a mean
const RAMPS = {
  light: {
    local: ["#fbfdff", "#cfe1f2", "#93c3df", "#4a97c9", "#1764ab", "#08306b"],
    memory: ["#f6fbf2", "#cdeac0", "#95cf8c", "#4fa85c", "#15793a", "#00441b"],
    negative: ["#fbf6fb", "#e4cfe6", "#c59fcc", "#9f6aae", "#763d8a", "#40004b"],
  },
  dark: {
    local: ["#10141c", "#1d3a66", "#2a63a3", "#4b93cf", "#8fc4ea", "#f1f8ff"],
    memory: ["#101a14", "#12452a", "#1d7141", "#47a35f", "#93d397", "#f1fbee"],
    negative: ["#1a121c", "#472050", "#76388a", "#a665b5", "#d3a6da", "#fdf2fd"],
  },
};
const TICKS = {
  linear: [0, 0.25, 0.5, 0.75, 1],
  root: [0, 0.01, 0.1, 0.25, 0.5, 1],
  log: [0.0001, 0.001, 0.01, 0.1, 1],
};
const SCALES = {
  linear: (weight) => weight,
  root: (weight) => Math.sqrt(weight),
  log: (weight) => (weight <= 1e-4 ? 0 : 1 + Math.log10(weight) / 4),
};
const withHeads = data.layers.filter((layer) => layer.weights);
const state = {
  layer: withHeads.find((layer) => layer.layer === data.farthest[0]),
  head: data.farthest[1],
  query: count - 1,
  key: count - 1,
  cell: 0,
  shown: null,
  moment: null,
};
const $ = (id) => document.getElementById(id);
const darkScheme = matchMedia("(prefers-color-scheme: dark)");

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// --- numbers -------------------------------------------------------------------------------------

async function unpack(text) {
  const packed = new Blob([Uint8Array.from(atob(text), (character) => character.charCodeAt(0))]);
  const stream = packed.stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// A layer's `weights` as codes, and its `fates` as [head][moment][token].
async function unpackLayer(layer) {
  layer.weights = await unpack(layer.weights);
  if (!layer.fates) return;
  const fates = await unpack(layer.fates),
    moments = fates.length / count / layer.heads;
  const row = (number) => fates.subarray(number * count, (number + 1) * count);
  layer.fates = Array.from({ length: layer.heads }, (_, head) =>
    Array.from({ length: moments }, (_, moment) => row(head * moments + moment)),
  );
}

// What each code stands for; 0 is a weight too small to be told from 0, 1 is none.
const NONE = 1,
  VALUES = Float32Array.from({ length: 65536 }, (_, code) =>
    code <= NONE
      ? 0
      : (code % 2 ? -1 : 1) * data.floor * Math.exp((Math.floor(code / 2) - 1) * data.step),
  );

// The weights of a head, [query · count + key]: `before` the gate, in its `output`, and `kinds`,
// what they come through.
function decode(layer, head) {
  if (head === MEAN) return meanOf(layer);
  const before = new Float32Array(count * count),
    kinds = new Uint8Array(count * count);
  const cells = (count * (count + 1)) / 2,
    high = layer.heads * cells,
    codes = layer.weights;
  for (let key = 0, next = head * cells; key < count; key++) {
    for (let query = key; query < count; query++, next++) {
      const code = codes[next] + (codes.length > high ? codes[high + next] << 8 : 0);
      if (code === NONE) continue;
      const place = query * count + key,
        fate = layer.fates?.[head][layer.segments[query]][key];
      before[place] = VALUES[code];
      kinds[place] = FATES[fate] === "memory" ? MEMORY : LOCAL;
    }
  }
  if (!layer.gate) return { before, output: before, kinds };
  const output = before.map((weight, place) => {
    const gate = layer.tokenGate[head][Math.floor(place / count)];
    return weight * (kinds[place] === MEMORY ? gate : 1 - gate);
  });
  return { before, output, kinds };
}

function meanOf(layer) {
  const { before, output, kinds } = decode(layer, 0),
    { heads } = layer;
  for (let head = 1; head < heads; head++) {
    const other = decode(layer, head);
    for (let place = 0; place < before.length; place++) {
      // some heads keep what others do not
      if (kinds[place] !== other.kinds[place]) kinds[place] = MIXED;
      before[place] += other.before[place];
      if (output !== before) output[place] += other.output[place];
    }
  }
  for (const weights of new Set([before, output]))
    weights.forEach((sum, place) => {
      weights[place] = sum / heads;
    });
  return { before, output, kinds };
}

// With what is drawn: the weights before or behind the gate, the memory's largest if beyond 1, and
// whether any is negative.
function viewOf(layer, head) {
  const found = decode(layer, head),
    weights = found[$("view").value];
  let top = 1,
    negative = false;
  weights.forEach((weight, place) => {
    if (found.kinds[place] <= LOCAL) return;
    top = Math.max(top, Math.abs(weight));
    negative ||= weight < 0;
  });
  return { ...found, weights, top: top > 1 ? roundUp(top) : 1, negative };
}

function spell(number, digits = 3) {
  if (number === null) return say("notFinite");
  const size = Math.abs(number);
  if (!size) return "0";
  return size < 1e-3 || size >= 1e5 ? number.toExponential(digits - 1) : number.toPrecision(digits);
}

// With the digits that its rounding leaves.
function spellWeight(weight) {
  return weight ? spell(weight, data.step > 0.02 ? 2 : 3) : say("below", tickText(data.floor));
}

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

// A number beside an axis or a ramp of colours, short whatever its size: 0.25, 2500, 300M, 3e+20.
function tickText(number) {
  const rounded = Number(number.toPrecision(3)),
    size = Math.abs(rounded);
  if (size < 1e5) return String(rounded);
  return size < 1e15 ? COMPACT.format(rounded) : rounded.toExponential();
}

// A number at least as large that is short to write, and its half too.
function roundUp(number) {
  if (!(number > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(number));
  return Number(
    ([1, 2, 3, 4, 5, 6, 8, 10].find((digit) => digit * power >= number) * power).toPrecision(2),
  );
}

// --- colours -------------------------------------------------------------------------------------

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : darkScheme.matches;
}

const colours = {}; // 256 of each ramp
function mixColours() {
  for (const [name, texts] of Object.entries(RAMPS[isDark() ? "dark" : "light"])) {
    const ramp = texts.map((text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)));
    colours[name] = Array.from({ length: 256 }, (_, place) => {
      const at = (place / 255) * (ramp.length - 1),
        low = Math.min(Math.floor(at), ramp.length - 2);
      return ramp[low].map((channel, index) =>
        Math.round(channel + (ramp[low + 1][index] - channel) * (at - low)),
      );
    });
  }
}

function colour(share, ramp = "local") {
  return colours[ramp][Math.round(Math.min(Math.max(share, 0), 1) * 255)];
}

// The colour of a weight in a head's view, at a place that is in sight.
function weightColour(view, place, scale = SCALES[$("scale").value]) {
  const weight = view.weights[place];
  if (view.kinds[place] === LOCAL) return colour(scale(weight));
  return colour(scale(Math.abs(weight) / view.top), weight < 0 ? "negative" : "memory");
}

function paint(node, [red, green, blue]) {
  node.style.background = `rgb(${red} ${green} ${blue})`;
  node.style.color = 0.3 * red + 0.59 * green + 0.11 * blue > 140 ? "#111" : "#fff";
}

// A view's weights as an image of `size` pixels a side; where several cells share a pixel, the
// largest is seen.
function draw(canvas, view, size) {
  const shown = new Int32Array(size * size).fill(-1); // the place of that cell
  for (let query = 0; query < count; query++) {
    const row = Math.floor((query * size) / count) * size;
    for (let key = 0; key <= query; key++) {
      const place = query * count + key,
        pixel = row + Math.floor((key * size) / count),
        other = shown[pixel];
      if (view.kinds[place] === OUT_OF_SIGHT) continue;
      if (other < 0 || Math.abs(view.weights[place]) > Math.abs(view.weights[other]))
        shown[pixel] = place;
    }
  }
  const image = new ImageData(size, size),
    scale = SCALES[$("scale").value];
  shown.forEach((place, pixel) => {
    if (place < 0) return;
    image.data.set(weightColour(view, place, scale), 4 * pixel);
    image.data[4 * pixel + 3] = 255;
  });
  canvas.width = canvas.height = size;
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// --- overview ------------------------------------------------------------------------------------

function headsAndMean(layer) {
  return [...Array(layer.heads).keys(), ...(layer.heads > 1 ? [MEAN] : [])];
}

function headName(layer, head) {
  return head === MEAN ? say("ofMean", layer.layer) : say("ofHead", layer.layer, head);
}

function buildOverview() {
  const thumbs = $("thumbs"),
    heads = headsAndMean(withHeads[0]);
  // the last is the mean, whose name is wider than a small picture
  const columns = `auto repeat(${heads.length - 1}, minmax(24px, 92px)) minmax(38px, 92px)`;
  thumbs.style.gridTemplateColumns = columns;
  const name = (text) => element("span", { className: "name", textContent: text });
  const made = [name(""), ...heads.map((head) => name(head === MEAN ? say("mean") : head))];
  for (const layer of data.layers) {
    made.push(name(layer.layer));
    if (layer.weights) {
      layer.buttons = headsAndMean(layer).map((head) => {
        const title = headName(layer, head),
          button = element("button", { type: "button", title, value: head });
        button.setAttribute("aria-label", title);
        button.append(element("canvas"));
        button.onclick = () => choose(layer, head);
        return button;
      });
      made.push(...layer.buttons);
    } else made.push(element("span", { className: "none", textContent: say("noAttention") }));
  }
  thumbs.replaceChildren(...made);
}

function drawOverview() {
  for (const layer of withHeads)
    for (const button of layer.buttons)
      setTimeout(() => {
        // the page answers in between
        draw(button.firstChild, viewOf(layer, Number(button.value)), Math.min(count, THUMB));
        button.firstChild.style.imageRendering = count < 40 ? "pixelated" : "auto";
      });
}
