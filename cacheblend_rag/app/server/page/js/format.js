// Numbers, and how an answer ended, as people read them.

export const STOPPED = "Stopped before the end.";

/** Seconds as milliseconds or seconds. */
export function time(seconds) {
  const ms = seconds * 1000;
  if (ms < 0.05) return "0 ms";
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  return `${seconds.toFixed(2)} s`;
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = count;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit && value < 9.95 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export const share = (part) => (part > 0 && part < 0.01 ? "<1%" : `${Math.round(part * 100)}%`);

export const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

/** How much sooner `seconds` is than `other`, in words. */
export function sooner(seconds, other) {
  if (!seconds || !other) return "";
  const factor = other / seconds;
  if (factor >= 0.95 && factor <= 1.05) return "as soon";
  return factor > 1 ? `${factor.toFixed(1)}× sooner` : `${(1 / factor).toFixed(1)}× later`;
}

/** A length of time that is not known exactly. */
export function roughly(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  return count(Math.round(seconds / 60), "minute");
}
