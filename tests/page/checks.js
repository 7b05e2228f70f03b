// What is wrong with a page, in words; each check answers a list.  Loaded into the page by the tests.
const textNodes = () => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (walker.currentNode.data.trim() && element.getClientRects().length) found.push(walker.currentNode);
  }
  return found;
};
const quoted = (node) => JSON.stringify(node.textContent.trim().slice(0, 40));
const box = (node) => {
  const range = document.createRange();
  range.selectNodeContents(node);
  return range.getBoundingClientRect();
};

// In pixels of the window: a drawing's text is as large as the drawing is scaled.
const smallTexts = (leastPx) =>
  textNodes()
    .map((node) => {
      const element = node.parentElement;
      const { a, b } = element instanceof SVGElement ? element.getScreenCTM() : { a: 1, b: 0 };
      return [parseFloat(getComputedStyle(element).fontSize) * Math.hypot(a, b), node];
    })
    .filter(([px]) => px < leastPx)
    .map(([px, node]) => `${px.toFixed(1)} px: ${quoted(node)}`);

const overflows = () => {
  const page = document.documentElement;
  const wide = page.clientWidth; // not innerWidth: a phone zooms out to show it all
  const found = page.scrollWidth > wide ? [`the page is ${page.scrollWidth} px wide`] : [];
  for (const node of textNodes()) {
    // What scrolls by itself may be wider than what is seen of it.
    if (node.parentElement.closest("figure, .scroll")?.matches(".scroll:not(:has(.tall)), :has(> svg)")) continue;
    const { left, right } = box(node);
    if (left < -1 || right > wide + 1) found.push(`outside: ${quoted(node)}`);
  }
  for (const element of document.querySelectorAll(".tile, .strip-of > *, .strips, ol li, ol span, summary, p"))
    if (!(element instanceof SVGElement) && element.scrollWidth > element.clientWidth + 1 && element.clientWidth)
      found.push(`wider than its place: ${quoted(element)}`);
  return found;
};

const rgba = (text) => {
  if (text === "none") return [0, 0, 0, 0];
  const [red, green, blue, alpha = 1] = text.match(/[\d.]+/g).map(Number);
  return [red, green, blue, alpha];
};
const over = (front, back) => back.map((value, i) => (i < 3 ? front[i] * front[3] + value * (1 - front[3]) : 1));
const behind = (element) => {
  const layers = [];
  for (let each = element; each; each = each.parentElement) layers.push(rgba(getComputedStyle(each).backgroundColor));
  return layers.reverse().reduce((back, front) => over(front, back), [255, 255, 255, 1]);
};
const luminance = (colour) => {
  const [red, green, blue] = colour.slice(0, 3).map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};
// As WCAG 2 has it: 1 to 21.
const contrast = (one, other) => {
  const [least, most] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (most + 0.05) / (least + 0.05);
};

const paleTexts = (least) =>
  textNodes()
    .map((node) => {
      const element = node.parentElement;
      const style = getComputedStyle(element);
      const back = behind(element);
      const colour = rgba(element instanceof SVGElement ? style.fill : style.color);
      return [contrast(over(colour, back), back), node];
    })
    .filter(([ratio]) => ratio < least)
    .map(([ratio, node]) => `${ratio.toFixed(2)}: ${quoted(node)}`);

// Lines of charts, bars of waterfalls, the fullest shade of strips: against what is behind them.
const paleShapes = (least) =>
  [...document.querySelectorAll("figure svg path, .track i")]
    .map((shape) => {
      const style = getComputedStyle(shape);
      const drawn = shape instanceof SVGElement && style.stroke !== "none" ? style.stroke : style.fill;
      const colour = rgba(shape instanceof SVGElement ? drawn : style.backgroundColor);
      return [shape, colour, behind(shape.parentElement)];
    })
    .filter(([shape, colour]) => !shape.matches(".l1, .l2, .l3, .l4, .l5, .l6, .l7") && !isGrid(colour) && colour[3])
    .map(([shape, colour, back]) => [contrast(colour, back), shape])
    .filter(([ratio]) => ratio < least)
    .map(([ratio, shape]) => `${ratio.toFixed(2)}: ${shape.outerHTML.slice(0, 60)}`);
const isGrid = (colour) => {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = "var(--line)";
  const line = rgba(getComputedStyle(probe).color);
  probe.remove();
  return colour.slice(0, 3).join() === line.slice(0, 3).join();
};

// Within a drawing nothing is cut off, and no text lies upon another.
const unreadable = () => {
  const found = [];
  for (const svg of document.querySelectorAll("figure svg:not(.strip)")) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map((text) => [text, text.getBoundingClientRect()]);
    for (const [text, { left, right, top, bottom }] of texts)
      if (left < frame.left - 1 || right > frame.right + 1 || top < frame.top - 2 || bottom > frame.bottom + 2)
        found.push(`cut off: ${quoted(text)}`);
    texts.forEach(([text, a], i) => {
      for (const [other, b] of texts.slice(i + 1)) {
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1 && high > 4) found.push(`${quoted(text)} upon ${quoted(other)}`);
      }
    });
  }
  return found;
};

const openAll = () => document.querySelectorAll("details").forEach((each) => (each.open = true));

// By figure of strips: each one's name and width.
const stripsOf = () =>
  [...document.querySelectorAll("figure .strips")].map((figure) =>
    [...figure.querySelectorAll("svg")].map((strip) => [strip.previousElementSibling.textContent, strip.clientWidth]),
  );
