// Digits as strokes and as cells: lines made small, examples, and lines that wander about.
export const SIDE = 8;
const FINE = 32, BLOCK = FINE / SIDE;
// held-out digits of scikit-learn, by rows, 0 to g for 0 to 16 of 16
export const EXAMPLES = [
  "002af70000ef7f2004g30b4004e0078007c0067004g10c4001ecag10001ed500",
  "002ga000004gg500008gg300009gg300008gg300008gg100005ge000001cg300",
  "04gg30000bebb0000b72g1000003g000000ac000003g853000cgggg003gf8740",
  "009ggf4008g97eb00551df10000ag7000001bg4000000e8000346g4000egg800",
  "0007c000003e600000b8001004g31aa008gced3002cag5000006g0000006d000",
  "00688d3001eec93004g8200004gdf70000003f0000003f000068d800009f8000",
  "000a8000006e300000b8000003g8200006gggf3000g208c000bc5bc00018gf20",
  "00dgf20005e5f7000020c7000059g700008ggga0002g3000008d000000f70000",
  "004fea100079098000b92d70004fe400006ff10004e1d70007d15d00007egg10",
  "002ed80000cdcd0000b66g40005gfg8000024b8000000b9002d71ba0002afg20",
];

export function blank() {
  return Array.from({ length: SIDE }, () => Array(SIDE).fill(0));
}

export function read(text) {
  return blank().map((row, r) => row.map((_, c) => parseInt(text[SIDE * r + c], 17) / 16));
}

// ------------------------------------------------------------------------------ from strokes to cells

/** Strokes moved to the middle, as tall as the digits that were learned from, as ink of 32 x 32 in blocks of 4 x 4. */
export function small(lines) {
  const points = lines.flat();
  if (!points.length) return blank();
  const box = (axis) => [Math.min(...points.map((p) => p[axis])), Math.max(...points.map((p) => p[axis]))];
  const [[left, right], [top, bottom]] = [box(0), box(1)];
  const scale = Math.min(27 / Math.max(bottom - top, 1), 21 / Math.max(right - left, 1), 0.4); // 0.4: a dot stays one
  const moved = lines.map((line) => line.map(([x, y]) => [
    FINE / 2 + (x - (left + right) / 2) * scale, FINE / 2 + (y - (top + bottom) / 2) * scale]));
  const ink = blank();
  for (let y = 0; y < FINE; y++) for (let x = 0; x < FINE; x++) {
    const near = Math.min(...moved.map((line) => away(line, x + 0.5, y + 0.5)));
    ink[Math.floor(y / BLOCK)][Math.floor(x / BLOCK)] += Math.min(1, Math.max(0, 2.9 - near));
  }
  return ink.map((row) => row.map((v) => Math.round(v) / BLOCK ** 2));
}

/** How far a point is from a line of points. */
function away(line, x, y) {
  let least = Infinity;
  for (let i = 0; i < line.length; i++) {
    const [[ax, ay], [bx, by]] = [line[Math.max(0, i - 1)], line[i]];
    const [dx, dy] = [bx - ax, by - ay], length = dx * dx + dy * dy;
    const t = length ? Math.min(1, Math.max(0, ((x - ax) * dx + (y - ay) * dy) / length)) : 0;
    least = Math.min(least, Math.hypot(x - ax - t * dx, y - ay - t * dy));
  }
  return least;
}

/** A line that wanders about: the same ones in the same order, however often the page is opened. */
export function wander(seed) {
  let state = 2654435761 * (seed + 1) >>> 0;
  const random = () => ((state = (1664525 * state + 1013904223) >>> 0) / 2 ** 32);
  const line = [[144, 144]];
  let heading = 2 * Math.PI * random();
  for (let i = 0; i < 26; i++) {
    heading += 2.4 * (random() - 0.5);
    const [x, y] = line.at(-1), next = [x + 34 * Math.cos(heading), y + 34 * Math.sin(heading)];
    if (next.some((v) => v < 20 || v > 268)) heading += Math.PI / 2;
    else line.push(next);
  }
  return line;
}
