"""The fixed HTML and the style of the page that [`hf_infini.inspection.page.inspection_page`] writes."""

BODY = """<header>
  <div>
    <h1 id="title"></h1>
    <p id="summary"></p>
  </div>
  <button type="button" id="theme" aria-label="Switch between light and dark">Dark</button>
</header>
<noscript><p>This page draws its data with JavaScript, which is switched off here.</p></noscript>
<main>
  <section id="overview" aria-labelledby="overview-title">
    <h2 id="overview-title">All heads</h2>
    <div id="thumbs"></div>
    <p class="note">Rows are layers, columns are heads. Choose one to look at it in full.</p>
  </section>
  <section id="detail" aria-labelledby="detail-title">
    <h2 id="detail-title"></h2>
    <form id="controls">
      <label>Layer <select id="layer"></select></label>
      <label>Head <select id="head"></select></label>
      <label>Colours <select id="scale">
        <option value="linear">linear</option>
        <option value="root" selected>square root</option>
        <option value="log">logarithmic</option>
      </select></label>
      <label>Cell <input type="range" id="zoom" min="1" max="40" step="1"> <output id="cell"></output></label>
      <button type="button" id="fit">Fit</button>
    </form>
    <div id="map" tabindex="0" role="application" aria-labelledby="detail-title" aria-describedby="keys">
      <div id="corner"><span>key →</span><span>query ↓</span></div>
      <div id="columns" aria-hidden="true"></div>
      <div id="rows" aria-hidden="true"></div>
      <div id="plane"><canvas id="cells"></canvas><div id="borders"></div><div id="cursor" hidden></div></div>
    </div>
    <div id="legend" aria-hidden="true"></div>
    <p class="note" id="keys">A row shows where one token (the query) looks: its weights over the tokens before it (the keys)
      sum to one. Grey is out of sight. Point at a cell, or use the arrow keys, Home, End, Page Up and Page Down.</p>
    <h3 id="sentence-title"></h3>
    <p id="sentence"></p>
    <p class="note">The outlined token is the query, the others are coloured by the weight it gives them. Choose a token to
      make it the query.</p>
  </section>
  <section id="memory" aria-labelledby="memory-title" hidden>
    <h2 id="memory-title">Memory</h2>
    <div id="charts"></div>
    <div id="tables"></div>
  </section>
</main>
<div id="tip" role="tooltip" hidden></div>
<div id="said" class="unseen" aria-live="polite"></div>
"""

STYLE = """:root {
  color-scheme: light dark;
  --paper: light-dark(#ffffff, #14171c);
  --raised: light-dark(#f4f5f7, #1d2128);
  --ink: light-dark(#1a1d21, #e6e8eb);
  --soft: light-dark(#5b6470, #a0a8b3);
  --line: light-dark(#d5d9de, #363c46);
  --void: light-dark(#e3e5e8, #2b3038);
  --accent: light-dark(#b3400a, #ffab5e);
  --gutter: 104px;
}
:root[data-theme=light] { color-scheme: light; }
:root[data-theme=dark] { color-scheme: dark; }
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body {
  margin: 0; padding: 20px 24px 48px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; font-variant-numeric: tabular-nums;
}
header { display: flex; justify-content: space-between; align-items: start; gap: 16px; }
h1 { font-size: 22px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 10px; }
h3 { font-size: 14px; margin: 20px 0 4px; }
p { margin: 0 0 10px; }
#summary, .note { color: var(--soft); }
.note { font-size: 13px; max-width: 75ch; margin-top: 8px; }
button, select { font: inherit; color: inherit; background: var(--raised); border: 1px solid var(--line); border-radius: 6px;
  padding: 3px 10px; }
button { cursor: pointer; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }

main { display: grid; grid-template-columns: minmax(240px, 3fr) minmax(0, 8fr); gap: 28px 36px; margin-top: 18px; }
main > section { min-width: 0; }
#memory { grid-column: 1 / -1; border-top: 1px solid var(--line); padding-top: 20px; }
@media (max-width: 900px) {
  :root { --gutter: 76px; }
  body { padding: 14px 14px 40px; }
  main { grid-template-columns: minmax(0, 1fr); }
}

#thumbs { display: grid; gap: 4px; align-items: center; justify-content: start; overflow-x: auto; padding: 3px; }
#thumbs .name { font-size: 12px; color: var(--soft); text-align: center; }
#thumbs .none { grid-column: 2 / -1; text-align: left; font-size: 13px; color: var(--soft); }
#thumbs button { padding: 0; border: 1px solid var(--line); border-radius: 3px; background: var(--void); line-height: 0;
  overflow: hidden; aspect-ratio: 1; }
#thumbs button[aria-pressed=true] { outline: 2px solid var(--accent); outline-offset: 1px; border-color: var(--accent); }
#thumbs canvas { width: 100%; height: 100%; }

#controls { display: flex; flex-wrap: wrap; gap: 8px 18px; align-items: center; margin-bottom: 12px; font-size: 14px; }
#controls label { display: inline-flex; gap: 6px; align-items: center; }
#zoom { width: 110px; accent-color: var(--accent); }
#cell { min-width: 3.2em; color: var(--soft); }

#map { display: grid; grid-template: var(--gutter) max-content / var(--gutter) max-content; overflow: auto;
  max-height: 88vh; width: fit-content; max-width: 100%; border: 1px solid var(--line); border-radius: 4px;
  background: var(--paper); }
#corner, #columns, #rows { position: sticky; background: var(--paper); z-index: 1; font-size: 12px; }
#corner { top: 0; left: 0; z-index: 2; color: var(--soft); padding: 6px 8px; display: flex; flex-direction: column;
  justify-content: end; align-items: end; line-height: 1.3; }
#columns { top: 0; }
#rows { left: 0; }
#columns span, #rows span { position: absolute; white-space: pre; overflow: hidden; text-overflow: ellipsis;
  unicode-bidi: isolate; }
#columns span { bottom: 0; height: var(--gutter); padding: 5px 0; writing-mode: vertical-rl; transform: rotate(180deg);
  display: flex; align-items: center; }
#rows span { left: 0; width: var(--gutter); padding: 0 6px; text-align: right; }
#columns .now, #rows .now { background: var(--paper); color: var(--accent); font-weight: 600; z-index: 1; }
#plane { position: relative; background: var(--void); }
#cells { display: block; width: 100%; height: 100%; image-rendering: pixelated; }
#borders, #cursor { position: absolute; pointer-events: none; }
#borders { inset: 0; }
#borders i { position: absolute; background: var(--accent); opacity: .55; }
#cursor { border: 2px solid var(--accent); border-radius: 2px; }

#legend { display: flex; align-items: start; gap: 8px; margin-top: 10px; font-size: 12px; color: var(--soft);
  max-width: 440px; }
#legend .bar { position: relative; flex: 1; height: 30px; margin: 0 10px; }
#legend .bar div { height: 10px; border: 1px solid var(--line); }
#legend .bar span { position: absolute; top: 12px; transform: translateX(-50%); }

#sentence { line-height: 1.9; max-width: 95ch; overflow-wrap: anywhere; }
#sentence span { padding: 2px 1px; border-radius: 3px; cursor: pointer; unicode-bidi: isolate; }
#sentence .query { outline: 2px solid var(--accent); outline-offset: 0; }
#sentence .later { color: var(--soft); }

#tip { position: fixed; z-index: 9; max-width: min(340px, 90vw); pointer-events: none; font-size: 13px; padding: 7px 10px;
  border-radius: 6px; background: var(--ink); color: var(--paper); box-shadow: 0 2px 10px rgb(0 0 0 / .3);
  overflow-wrap: anywhere; }
#tip dl { display: grid; grid-template-columns: auto 1fr; gap: 0 10px; margin: 0; }
#tip dt { opacity: .75; }
#tip dd { margin: 0; font-weight: 600; }

#charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 20px 36px; }
#charts figure, #tables figure { margin: 0; min-width: 0; }
figcaption { font-size: 14px; font-weight: 600; margin-bottom: 4px; }
figcaption small { display: block; font-weight: 400; font-size: 13px; color: var(--soft); }
svg { display: block; width: 100%; height: 210px; overflow: visible; }
svg text { font-size: 12px; fill: var(--soft); }
svg path { fill: none; stroke-width: 1.5; stroke: var(--soft); opacity: .45; }
svg path.chosen { stroke: var(--accent); stroke-width: 2.2; opacity: 1; }
svg line { stroke: var(--line); }
svg line.now { stroke: var(--accent); stroke-dasharray: 3 3; }
#tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr)); gap: 20px 36px;
  margin-top: 24px; }
#tables details { grid-column: 1 / -1; }
.scroll { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 2px; font-size: 13px; }
th { font-weight: 400; color: var(--soft); padding: 2px 4px; text-align: right; white-space: nowrap; }
td { padding: 3px; text-align: right; border-radius: 3px; min-width: 42px; }
td.chosen { outline: 2px solid var(--accent); outline-offset: -2px; }
summary { cursor: pointer; font-size: 14px; margin-bottom: 8px; }
"""
