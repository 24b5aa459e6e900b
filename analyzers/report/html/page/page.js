"use strict";
// Draws every figure of the page, in the reader's light or dark, and again when that changes or the page is printed.
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const templates = read("templates");
  const darkness = window.matchMedia("(prefers-color-scheme: dark)");
  const narrowness = window.matchMedia("(max-width: 640px)");
  const places = [...document.querySelectorAll(".figure")];
  const drawn = new Set();
  let printing = false;

  const layoutOf = (figure) => ({
    ...figure.layout, autosize: true, template: templates[darkness.matches && !printing ? "dark" : "light"],
  });
  const options = {
    displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d"],
    showLink: false, showSendToCloud: false, plotlyServerURL: "",
  };
  const fit = (place, { data, layout }) => { // where a page is narrow, its legend has a row a name: the plot keeps its height
    place.dataset.height ||= parseInt(place.style.height, 10);
    const named = data.filter((trace) => trace.name && trace.showlegend !== false).length;
    const rows = narrowness.matches && !printing && layout.showlegend !== false ? Math.max(0, named - 3) : 0;
    layout.height = Number(place.dataset.height) + 16 * rows;
    place.style.height = `${layout.height}px`;
  };
  const draw = (place) => {
    if (place.hidden) return Promise.resolve();
    const figure = read(place.dataset.figure);
    fit(place, figure);
    return Plotly.react(place, figure.data, layoutOf(figure), options).then(() => {
      drawn.add(place);
      document.documentElement.dataset.drawn = drawn.size;
    });
  };
  const drawAll = async () => {
    for (const place of places) {
      await draw(place);
      await new Promise((done) => setTimeout(done, 0)); // the page stays alive between two figures
    }
    document.documentElement.dataset.ready = "yes";
  };

  for (const tabs of document.querySelectorAll(".tabs")) {
    const buttons = [...tabs.querySelectorAll("button")];
    tabs.addEventListener("click", (event) => {
      const chosen = event.target.closest("button");
      if (!chosen) return;
      for (const button of buttons) {
        const place = document.getElementById(button.dataset.shows);
        button.setAttribute("aria-selected", String(button === chosen));
        place.hidden = button !== chosen;
        if (button === chosen) draw(place);
      }
    });
  }
  for (const query of [darkness, narrowness]) query.addEventListener("change", drawAll);
  window.addEventListener("beforeprint", () => { printing = true; places.filter((p) => drawn.has(p)).forEach(draw); });
  window.addEventListener("afterprint", () => { printing = false; drawAll(); });
  drawAll();
})();
