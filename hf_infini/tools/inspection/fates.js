// --- where each token is: a sink, in the window, kept, or in the memory --------------------------

const FATES = ["none", "sink", "window", "kept", "memory"],
  KEPT = 3;

function shownHeads() {
  return state.head === MEAN ? [...state.layer.fates.keys()] : [state.head];
}

// For each head that is shown, the number in FATES of a token at a moment.
function fatesOf(token, moment) {
  return shownHeads().map((head) => Number(state.layer.fates[head][moment][token]));
}

function shareKept(token, moment) {
  const fates = fatesOf(token, moment);
  return fates.filter((fate) => fate === KEPT).length / fates.length;
}

function momentName(moment) {
  return moment === state.layer.fates[0].length - 1 ? say("afterText") : say("asRead", moment);
}

function drawFates() {
  const { layer } = state;
  $("keeps").hidden = !layer.fates;
  if (!layer.fates) return;
  const last = layer.fates[0].length - 1,
    moment = Math.min(state.moment ?? last, last),
    slider = $("moment");
  slider.max = last;
  slider.value = moment;
  $("moment-name").textContent = momentName(moment);
  const anyKept = layer.fates.some((rows) => rows.some((row) => row.includes(KEPT)));
  $("fates-title").textContent = say(
    anyKept ? "keeps" : "whereTokens",
    headName(layer, state.head),
  );
  const counts = FATES.map(() => 0),
    heads = shownHeads().length;
  $("fates").replaceChildren(
    ...textParts((part, token) => {
      const fates = fatesOf(token, moment),
        share = shareKept(token, moment);
      for (const fate of fates) counts[fate] += 1 / heads;
      part.className = FATES[share ? KEPT : fates[0]];
      if (share) part.style.setProperty("--share", 0.25 + 0.75 * share);
      part.onpointermove = part.onpointerdown = (event) =>
        tell(fateFacts(token, moment), event.clientX, event.clientY);
      part.onpointerleave = leave;
    }),
  );
  const closed = layer.gate.every((gate) => gate === 0);
  $("counts").replaceChildren(
    ...FATES.flatMap((name, fate) =>
      fate && (fate !== KEPT || anyKept)
        ? [
            element("span", {
              className: name,
              textContent:
                fate === FATES.length - 1 && closed
                  ? say("memoryClosed")
                  : `${say(name)} ${Number(counts[fate].toFixed(1))}`,
            }),
          ]
        : [],
    ),
  );
}

function fateFacts(token, moment) {
  const { layer, head } = state,
    last = layer.fates[0].length - 1;
  const found = [
    [say("token"), `${token} ${tokens[token]}`],
    [say("segment"), layer.segments[token]],
  ];
  if (head !== MEAN) {
    const kept = [...layer.fates[head].keys()].filter((place) => shareKept(token, place)),
      until = kept.at(-1);
    found.push([momentName(moment), say(FATES[fatesOf(token, moment)[0]])]);
    if (kept.length)
      found.push([say("kept"), say("fromTo", kept[0], until === last ? say("end") : until)]);
  }
  const everywhere = withHeads.flatMap((other) => other.fates ?? []);
  const keeping = (rows) =>
    say("ofAll", rows.filter((row) => Number(row[moment][token]) === KEPT).length, rows.length);
  found.push([say("keptBy"), keeping(layer.fates)], [say("keptByAll"), keeping(everywhere)]);
  return found;
}
