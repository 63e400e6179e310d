// Axes of the curves.
// Labels with three digits; of a logarithmic axis only powers of ten.
export function axes(ink, grid, isLog) {
  const line = { stroke: grid, width: 1 };
  const power = (v) => v !== null && Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-9;
  const label = (v) => (v === null ? "" : v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6) ? v.toExponential(0) : String(Number(v.toPrecision(6))));
  const x = { stroke: ink, grid: line, ticks: { stroke: grid }, size: 34, label: "boundary", labelSize: 16, labelFont: "12px system-ui" };
  const y = { stroke: ink, grid: line, ticks: { stroke: grid }, size: 60, values: (_, splits) => splits.map(label) };
  if (isLog) {
    // At most six of them.
    const powers = (_, splits) => {
      const all = splits.filter(power), each = Math.ceil(all.length / 6);
      return splits.map((v) => (power(v) && all.indexOf(v) % each === 0 ? v : null));
    };
    y.filter = powers;
    y.grid = { ...line, filter: powers };
    y.ticks = { stroke: grid, filter: powers };
  }
  return [x, y];
}
