// Building and renewing what is shown. Text only ever becomes text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// What the reader has opened, and where the focus is, survive: nodes are changed, not replaced, where that is possible.
export function renew(parent, ...children) {
  const wanted = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  const nodes = wanted.map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
  const keyed = new Map([...parent.children].filter((old) => old.dataset.key).map((old) => [old.dataset.key, old]));
  nodes.forEach((node, at) => {
    let old = parent.childNodes[at];
    const known = node.nodeType === Node.ELEMENT_NODE && node.dataset.key ? keyed.get(node.dataset.key) : undefined;
    if (known !== undefined && known !== old && known.parentNode === parent) {
      parent.insertBefore(known, old ?? null);
      old = known;
    }
    if (old === undefined) parent.append(node);
    else if (!alike(old, node)) parent.replaceChild(node, old);
    else if (node.nodeType === Node.TEXT_NODE) {
      if (old.data !== node.data) old.data = node.data;
    } else {
      renewAttributes(old, node);
      renew(old, ...node.childNodes);
    }
  });
  while (parent.childNodes.length > nodes.length) parent.lastChild.remove();
}

function alike(old, node) {
  if (old.nodeType !== node.nodeType || old.nodeName !== node.nodeName) return false;
  return node.nodeType !== Node.ELEMENT_NODE || old.dataset.key === node.dataset.key;
}

function renewAttributes(old, node) {
  for (const { name } of [...old.attributes]) {
    if (!node.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  }
  for (const { name, value } of node.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}
