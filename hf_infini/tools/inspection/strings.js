"use strict";
// Everything that the page says, in each of its languages; {0}, {1}, … are filled in by `say`.
const STRINGS = {
  en: {
    switch: "Português",
    dark: "Dark",
    light: "Light",
    theme: "Switch between light and dark",
    title: "Attention heads of {0}",
    summary: "Tokens: {0} · layers: {1} · attention: {2}",
    range: "{0} to {1}",
    overview: "All heads",
    noAttention: "no attention",
    overviewNote: "Rows are layers, columns are heads. Choose one to look at it in full.",
    layer: "Layer",
    head: "Head",
    mean: "mean",
    cell: "Cell",
    fit: "Fit",
    key: "key",
    query: "query",
    earlierQuery: "earlier query",
    laterQuery: "later query",
    earlierKey: "earlier key",
    laterKey: "later key",
    ofHead: "Layer {0}, head {1}",
    ofMean: "Layer {0}, mean over its heads",
    weights: "Weights",
    output: "in the head's output",
    before: "before the gate",
    colours: "Colours",
    linear: "linear",
    root: "square root",
    log: "logarithmic",
    bar: "weight",
    localBar: "local",
    memoryBar: "memory",
    keys:
      "A row shows where one token (the query) looks: its weights over the tokens before it " +
      "(the keys) sum to one. Grey is out of sight. Point at a cell, or use the arrow keys, " +
      "Home, End, Page Up and Page Down.",
    memoryKeys:
      "A row shows where one token (the query) looks. Blue: by softmax, tokens of its window, " +
      "sinks and kept ones. Green: the others, through the memory; purple where their weight is " +
      "negative. In the head's output, local weights count 1 − g times and the memory's g " +
      "times, with the gate g. Grey is out of sight. Point at a cell, or use the arrow keys, " +
      "Home, End, Page Up and Page Down.",
    keeps: "What it keeps: {0}",
    whereTokens: "Where each token is: {0}",
    moment: "Moment",
    afterText: "after the text",
    asRead: "as segment {0} is read",
    none: "not there",
    sink: "sink",
    window: "window",
    kept: "kept",
    memory: "in the memory",
    memoryClosed: "the memory is closed (g = 0)",
    token: "token",
    rounded: "Weights are rounded to {0} %; sizes below {1} are drawn as 0.",
    below: "below {0}",
    keptBy: "kept by heads of the layer",
    keptByAll: "of all layers here",
    ofAll: "{0} of {1}",
    fromTo: "segments {0} to {1}",
    fatesNote:
      "The softmax sees sinks, kept tokens and the window. When a segment leaves the window, " +
      "the tokens with the highest scores are kept, and the memory takes in the others; heads " +
      "that share keys keep the same. Pale: not read yet, or left out of the memory. Point at a " +
      "token for its numbers.",
    looks: "Where token {0}, “{1}”, looks",
    sentenceNote:
      "The outlined token is the query, the others are coloured by the weight it gives them. " +
      "Choose a token to make it the query.",
    weight: "weight",
    localWeight: "local weight",
    memoryWeight: "memory weight",
    inOutput: "in the output",
    gate: "gate g",
    share: "memory's share",
    notFinite: "not finite",
    later: "none: the key comes later",
    outOfSight: "none: out of the query's sight",
    memoryOf: "Memory of layer {0}",
    noMemory: "Layer {0} has no memory",
    unread: "The text ends before any of it leaves the local window: no token reads a memory.",
    coloured: "head {0} coloured, the layer's others grey",
    colouredMean: "the mean coloured, the layer's heads grey",
    tokenAxis: "token",
    segment: "segment",
    end: "end",
    lines: "{0}, a line for each head",
    shareTitle: "Memory's share of each token's output",
    shareNote: "‖g · memory‖ / (‖g · memory‖ + ‖(1 − g) · local‖): {0}",
    normTitle: "Norm of the memory as each segment reads it",
    normNote: "‖M‖: {0}; “end” is after the text",
    gateTable: "Gate",
    gateNote: "sigmoid(β): the weight of the memory, the rest is local",
    shareTable: "Mean share of the memory",
    shareTableNote: "over the tokens that read one",
    numbers: "‖M‖ in numbers",
    numbersNote: "layer {0}, as each segment reads it",
    corner: "{0} / head",
  },
  pt: {
    switch: "English",
    dark: "Escuro",
    light: "Claro",
    theme: "Alternar entre claro e escuro",
    title: "Cabeças de atenção de {0}",
    summary: "Tokens: {0} · camadas: {1} · atenção: {2}",
    range: "{0} a {1}",
    overview: "Todas as cabeças",
    noAttention: "sem atenção",
    overviewNote:
      "As linhas são camadas, as colunas são cabeças. Escolha uma para vê-la por inteiro.",
    layer: "Camada",
    head: "Cabeça",
    mean: "média",
    cell: "Célula",
    fit: "Ajustar",
    key: "chave",
    query: "consulta",
    earlierQuery: "consulta anterior",
    laterQuery: "consulta seguinte",
    earlierKey: "chave anterior",
    laterKey: "chave seguinte",
    ofHead: "Camada {0}, cabeça {1}",
    ofMean: "Camada {0}, média das cabeças",
    weights: "Pesos",
    output: "na saída da cabeça",
    before: "antes do gate",
    colours: "Cores",
    linear: "linear",
    root: "raiz quadrada",
    log: "logarítmica",
    bar: "peso",
    localBar: "local",
    memoryBar: "memória",
    keys:
      "Cada linha mostra para onde um token (a consulta) olha: seus pesos sobre os tokens " +
      "anteriores (as chaves) somam um. O cinza está fora de vista. Aponte para uma célula ou " +
      "use as setas, Home, End, Page Up e Page Down.",
    memoryKeys:
      "Cada linha mostra para onde um token (a consulta) olha. Azul: por softmax, tokens da sua " +
      "janela, iniciais e guardados. Verde: os outros, pela memória; roxo onde o peso é " +
      "negativo. Na saída da cabeça, os pesos locais contam 1 − g vezes e os da memória g " +
      "vezes, sendo g o gate. O cinza está fora de vista. Aponte para uma célula ou use as " +
      "setas, Home, End, Page Up e Page Down.",
    keeps: "O que guarda: {0}",
    whereTokens: "Onde está cada token: {0}",
    moment: "Momento",
    afterText: "depois do texto",
    asRead: "quando o segmento {0} é lido",
    none: "ausente",
    sink: "inicial (sink)",
    window: "janela",
    kept: "guardado",
    memory: "na memória",
    token: "token",
    memoryClosed: "a memória está fechada (g = 0)",
    rounded: "Os pesos são arredondados a {0} %; tamanhos abaixo de {1} aparecem como 0.",
    below: "abaixo de {0}",
    keptBy: "guardado por cabeças da camada",
    keptByAll: "de todas as camadas aqui",
    ofAll: "{0} de {1}",
    fromTo: "segmentos {0} a {1}",
    fatesNote:
      "O softmax vê os tokens iniciais (sinks), os guardados e a janela. Quando um segmento sai " +
      "da janela, os tokens com as maiores pontuações são guardados, e a memória absorve os " +
      "outros; cabeças com as mesmas chaves guardam os mesmos. Pálido: ainda não lido, ou " +
      "deixado fora da memória. Aponte para um token para ver seus números.",
    looks: "Para onde olha o token {0}, “{1}”",
    sentenceNote:
      "O token contornado é a consulta; os outros têm a cor do peso que ela lhes dá. Escolha um " +
      "token para que ele seja a consulta.",
    weight: "peso",
    localWeight: "peso local",
    memoryWeight: "peso na memória",
    inOutput: "na saída",
    gate: "gate g",
    share: "parte da memória",
    notFinite: "não finito",
    later: "nenhum: a chave vem depois",
    outOfSight: "nenhum: fora da vista da consulta",
    memoryOf: "Memória da camada {0}",
    noMemory: "A camada {0} não tem memória",
    unread:
      "O texto acaba antes que alguma parte saia da janela local: nenhum token lê uma memória.",
    coloured: "cabeça {0} em cor, as outras da camada em cinza",
    colouredMean: "a média em cor, as cabeças da camada em cinza",
    tokenAxis: "token",
    segment: "segmento",
    end: "fim",
    lines: "{0}, uma linha por cabeça",
    shareTitle: "Parte da memória na saída de cada token",
    shareNote: "‖g · memória‖ / (‖g · memória‖ + ‖(1 − g) · local‖): {0}",
    normTitle: "Norma da memória que cada segmento lê",
    normNote: "‖M‖: {0}; “fim” é depois do texto",
    gateTable: "Gate",
    gateNote: "sigmoid(β): o peso da memória, o resto é local",
    shareTable: "Parte média da memória",
    shareTableNote: "sobre os tokens que leem uma",
    numbers: "‖M‖ em números",
    numbersNote: "camada {0}, como cada segmento a lê",
    corner: "{0} / cabeça",
  },
};
let language = navigator.language.toLowerCase().startsWith("pt") ? "pt" : "en";

function say(name, ...values) {
  return STRINGS[language][name].replace(/\{(\d)\}/g, (_, number) => values[number]);
}

// The words that page.html leaves open: `data-say` is an element's text, `data-label` what a screen
// reader calls it.
function sayAll() {
  document.documentElement.lang = language;
  for (const node of document.querySelectorAll("[data-say]"))
    node.textContent = say(node.dataset.say);
  for (const node of document.querySelectorAll("[data-label]"))
    node.setAttribute("aria-label", say(node.dataset.label));
}
