// Numbers, sizes, spans and moments as people read them; the same words as on the command line.

const MIN_WATERMARK_US = -(2 ** 63);
const MAX_WATERMARK_US = 2 ** 63 - 1;
const LAG_MAX_S = 365 * 86400;
export const NOTHING = "–";

export function count(number) {
  return number.toLocaleString("en-US");
}

export function short(number) {
  for (const [limit, unit] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
    if (number >= 0.9995 * limit) {
      const scaled = number / limit;
      return (scaled < 100 ? scaled.toFixed(1) : scaled.toFixed(0)) + unit;
    }
  }
  return number > 0 && number < 10 ? String(Math.round(number * 10) / 10) : number.toFixed(0);
}

export function rate(number) {
  return number === null ? NOTHING : short(number) + "/s";
}

export function size(bytes) {
  for (const [limit, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (bytes >= limit) return (bytes / limit).toFixed(1) + " " + unit;
  }
  return bytes.toFixed(0) + " B";
}

export function span(seconds) {
  if (seconds < 0) return "-" + span(-seconds);
  if (seconds < 1) return (seconds * 1000).toFixed(0) + " ms";
  if (seconds < 10) return seconds.toFixed(1) + " s";
  const units = [[365 * 86400, "y"], [86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const left = Math.round(seconds);
  for (let i = 0; i < units.length; i++) {
    const [unit, name] = units[i];
    if (left < unit) continue;
    const whole = Math.floor(left / unit);
    if (i + 1 === units.length) return `${whole} ${name}`;
    const [next, nextName] = units[i + 1];
    const more = Math.floor((left % unit) / next);
    return more ? `${whole} ${name} ${more} ${nextName}` : `${whole} ${name}`;
  }
  return "0 s";
}

export function share(part) {
  return Math.round(100 * Math.min(1, Math.max(0, part))) + "\u00a0%";
}

export function clock(ms) {
  return new Date(ms).toLocaleTimeString("en-GB");
}

export function hasWatermark(us) {
  return us !== null && us > MIN_WATERMARK_US && us < MAX_WATERMARK_US;
}

export function watermark(us) {
  if (us === null || us <= MIN_WATERMARK_US) return NOTHING;
  if (us >= MAX_WATERMARK_US) return "end of data";
  const date = new Date(us / 1000);
  return isNaN(date) ? `${us} µs` : date.toISOString().slice(0, 19).replace("T", " ") + " UTC";
}

// null where event time is of another year: made up, or read again.
export function lagSeconds(us, nowMs) {
  if (!hasWatermark(us)) return null;
  const behind = nowMs / 1e3 - us / 1e6;
  return Math.abs(behind) < LAG_MAX_S ? behind : null;
}
