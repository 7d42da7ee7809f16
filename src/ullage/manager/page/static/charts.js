// What charts do in the browser. Words of users become text only: on the canvas, or as textContent of an element.
window.ullage = (() => {
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const TINTS = ["#00897b", "#5c6bc0", "#c77700", "#ad5196", "#4f8f3a", "#3d8fc4"];

  // A tooltip: an element for each line of what is told about a point.
  function about(point) {
    const box = document.createElement("div");
    box.className = "about";
    for (const line of point.data?.about ?? []) {
      box.append(Object.assign(document.createElement("div"), { textContent: line }));
    }
    return box;
  }

  // A bar of the Gantt chart: row, begin, end, tint, 1 if it failed, 1 if it was tried before, label.
  function bar(params, api) {
    const area = params.coordSys;
    const [begin, y] = api.coord([api.value(1), api.value(0)]);
    const [end] = api.coord([api.value(2), api.value(0)]);
    const left = Math.max(begin, area.x);
    const right = Math.min(Math.max(end, begin + 2), area.x + area.width);
    if (right <= area.x || left >= area.x + area.width) return null;
    const height = Math.max(4, api.size([0, 1])[1] - 3);
    const top = y - height / 2;
    const failed = api.value(4);
    const wide = right - left;
    const parts = [{
      type: "rect",
      shape: { x: left, y: top, width: wide, height, r: 2 },
      style: { fill: TINTS[api.value(3) % TINTS.length], opacity: failed ? 0.55 : 1 },
    }];
    if (failed) {
      parts.push({ type: "rect", shape: { x: Math.max(left, right - 4), y: top, width: Math.min(4, wide), height },
                   style: { fill: css("--bad") } });
    }
    const marks = (api.value(5) ? "\u21bb " : "") + (failed ? "\u00d7 " : "");
    const label = wide > 34 ? marks + api.value(6) : wide > 12 ? marks.trim() : "";
    if (label) {
      parts.push({ type: "text", silent: true, style: {
        x: left + 4, y, text: label, fill: "#fff", font: "12px system-ui, sans-serif", textVerticalAlign: "middle",
        width: wide - 10, overflow: "truncate", ellipsis: "",
      } });
    }
    return { type: "group", children: parts };
  }

  // The ground behind the rows of a GPU: its first row and how many it has.
  function ground(params, api) {
    const area = params.coordSys;
    const step = api.size([0, 1])[1];
    const [, y] = api.coord([0, api.value(0)]);
    return { type: "rect", silent: true,
             shape: { x: area.x, y: y - step / 2, width: area.width, height: step * api.value(1) },
             style: { fill: css("--free"), opacity: params.dataIndex % 2 ? 0.25 : 0.7 } };
  }

  // Which part of the time a chart shows now, in milliseconds, and of which run: its title, which nobody sees.
  function shown(id) {
    const { dataZoom, title } = getElement(id).chart.getOption();
    return { begin: dataZoom[0].startValue, end: dataZoom[0].endValue, run: title[0].text };
  }

  return { about, bar, css, ground, shown, tints: TINTS };
})();
