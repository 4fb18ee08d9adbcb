// Runs in a page for audit_site.py: what is wrong with its layout, as a list of [what, where].
({phone, least}) => {
  const found = [], main = document.querySelector("main"), root = document.documentElement;
  const said = e => (e.alt || e.textContent || e.id || e.tagName).trim().replace(/\s+/g, " ").slice(0, 60);
  const note = (what, e) => found.push([what, said(e)]);
  const shown = e => e.getClientRects().length && getComputedStyle(e).visibility == "visible";
  const right = e => e.getBoundingClientRect().right;
  const edge = Math.min(right(main), root.clientWidth) + 1;
  const scrolls = e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
  const scroller = e => { for (; e && e != main; e = e.parentElement) if (scrolls(e)) return e; };
  const cut = e => e.scrollWidth > e.clientWidth + 1;

  if (root.scrollWidth > root.clientWidth) {
    const wide = e => shown(e) && !scroller(e) && right(e) > root.clientWidth + 1;
    note("the page is wider than the window", [...document.body.querySelectorAll("*")].filter(wide).at(-1) || root);
  }
  for (const e of main.querySelectorAll("img, svg, video")) {
    if (shown(e) && right(e) > edge) note("figure cut", e);
    if (e.tagName != "IMG") continue;
    if (!e.alt.trim()) note("figure without alt text", {alt: e.src.split("/").slice(-3).join("/")});
    if (e.complete && !e.naturalWidth) note("figure missing", {alt: e.src});
  }
  for (const e of main.querySelectorAll("table, pre, math[display=block]")) {
    if (!shown(e)) continue;
    const pre = e.closest(".cell-output") ? "output" : "code";
    const kind = e.tagName == "TABLE" ? "table" : e.tagName == "PRE" ? pre : "formula";
    const inside = scroller(e);
    if (right(inside || e) > edge) note(kind + " cut", e);
    else if (!phone && (cut(e) || inside && cut(inside))) note(kind + " wider than the page", e);
  }

  // On a phone: a word that goes on in the next line of its cell, a button over the first line of code, a part that scrolls and doesn't show it
  const inRange = (node, from, to) => { const r = document.createRange(); r.setStart(node, from); r.setEnd(node, to); return r; };
  const textsIn = e => { const w = document.createTreeWalker(e, NodeFilter.SHOW_TEXT), res = []; while (w.nextNode()) res.push(w.currentNode); return res; };
  if (phone) for (const cell of main.querySelectorAll("td, th")) {
    if (!shown(cell)) continue;
    for (const t of textsIn(cell)) for (const m of t.data.matchAll(/[\p{L}\p{N}_]{2,}/gu)) {
      const tops = [...inRange(t, m.index, m.index + m[0].length).getClientRects()].map(r => Math.round(r.top));
      if (Math.max(...tops) - Math.min(...tops) > 4) note("word split in a table", {alt: m[0]});
    }
  }
  if (phone) for (const b of main.querySelectorAll(".code-copy-button")) {
    const first = shown(b) && textsIn(b.closest("pre, div").querySelector("code") || b).find(t => t.data.trim());
    if (first && inRange(first, 0, 1).getBoundingClientRect().top < b.getBoundingClientRect().bottom - 6) note("code below its button", first.parentElement);
  }
  for (const e of main.querySelectorAll("pre, table"))
    if (shown(e) && !e.closest("details:not([open])") && scrolls(e) && e.scrollWidth > e.clientWidth + 2 && !e.classList.contains("more-right")) note("scrolls without a hint", e);

  // Contrast of text to what is behind, by the colors that the browser computed, which may be partly transparent
  const rgba = color => {
    const n = color.match(/[\d.]+/g).map(Number);
    return [...n.slice(0, 3).map(x => color.startsWith("color(") ? x*255 : x), n[3] ?? 1];
  };
  const onto = (a, b) => [0, 1, 2].map(i => a[i]*a[3] + b[i]*(1 - a[3])).concat(1);
  const behind = e => {
    const layers = [];
    for (; e && layers.at(-1)?.[3] != 1; e = e.parentElement) layers.push(rgba(getComputedStyle(e).backgroundColor));
    return layers.reduceRight((below, c) => onto(c, below), [255, 255, 255, 1]);
  };
  const linear = x => (x /= 255) <= .04045 ? x/12.92 : ((x + .055)/1.055)**2.4;
  const light = ([r, g, b]) => .2126*linear(r) + .7152*linear(g) + .0722*linear(b);
  const seen = new Set(), texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; text = texts.nextNode();) {
    const e = text.parentElement;
    if (!text.data.trim() || !shown(e) || e.closest("svg, script, style, .visually-hidden, option")) continue;
    const {color, fontSize} = getComputedStyle(e), back = behind(e), key = color + back;
    const [low, high] = [light(onto(rgba(color), back)), light(back)].sort((a, b) => a - b);
    const ratio = (high + .05)/(low + .05);
    if (ratio >= (parseFloat(fontSize) >= 24 ? 3 : least) || seen.has(key)) continue; // large text may be fainter
    seen.add(key);
    note(`contrast ${ratio.toFixed(1)} of ${color} (${e.className || e.tagName})`, e);
  }
  return found;
}
