"use strict";
for (const figure of document.querySelectorAll(".chart")) {
  const points = JSON.parse(figure.dataset.points);
  const svg = figure.querySelector("svg");
  const cursor = figure.querySelector(".cursor");
  const output = figure.querySelector("output");
  let at = -1;
  const show = (index) => {
    at = Math.min(points.length - 1, Math.max(0, index));
    const [x, text] = points[at];
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.style.visibility = "visible";
    output.textContent = text;
  };
  figure.addEventListener("keydown", (event) => {
    const to = {
      ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 10, PageDown: at + 10,
      Home: 0, End: points.length - 1,
    }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      show(to);
    }
  });
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    let best = 0;
    points.forEach(([other], index) => {
      if (Math.abs(other - x) < Math.abs(points[best][0] - x)) best = index;
    });
    show(best);
  });
}
