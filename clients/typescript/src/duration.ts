/** A length of time: milliseconds, or text as taskd writes it: `"250ms"`, `"30s"`, `"1h 30m"`. */
export type Duration = number | string;

const SECOND = 1000;
const UNITS: Readonly<Record<string, number>> = {
  ms: 1,
  s: SECOND,
  sec: SECOND,
  m: 60 * SECOND,
  min: 60 * SECOND,
  h: 3600 * SECOND,
  d: 86_400 * SECOND,
  day: 86_400 * SECOND,
  days: 86_400 * SECOND,
};
/** The longest time that `setTimeout` takes. A longer one would end at once. */
export const LONGEST_TIMER = 2 ** 31 - 1;

/** Reads a duration as milliseconds. `name` says in the error which one is wrong. */
export function milliseconds(duration: Duration, name: string): number {
  const wrong = (): never => {
    throw new TypeError(`${name}: ${JSON.stringify(duration)} is not a duration; write "250ms", "30s" or "1h 30m"`);
  };
  if (typeof duration === "number") {
    return Number.isFinite(duration) && duration >= 0 ? Math.round(duration) : wrong();
  }
  const parts = /^\s*(\d+\s*[a-z]+\s*)+$/.test(duration) ? duration.matchAll(/(\d+)\s*([a-z]+)/g) : wrong();
  let total = 0;
  for (const [, count, unit] of parts) {
    total += Number(count) * (UNITS[unit ?? ""] ?? wrong());
  }
  return Number.isSafeInteger(total) ? total : wrong();
}

/** A duration as taskd reads it. */
export function durationText(duration: Duration, name: string): string {
  return `${String(milliseconds(duration, name))}ms`;
}

/** Waits, and ends early when the signal is aborted. It never rejects. */
export async function pause(ms: number, signal?: AbortSignal): Promise<void> {
  if (signal?.aborted === true) return;
  await new Promise<void>((resolve) => {
    const end = (): void => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, Math.min(ms, LONGEST_TIMER));
    signal?.addEventListener("abort", end, { once: true });
  });
}

/**
 * Aborts the controller with the signal, until the returned function is called. In Node.js 20, a signal that lives long
 * would keep an entry of each AbortSignal.any().
 */
export function abortWith(controller: AbortController, signal: AbortSignal): () => void {
  const abort = (): void => {
    controller.abort(signal.reason);
  };
  if (signal.aborted) abort();
  signal.addEventListener("abort", abort, { once: true });
  return () => {
    signal.removeEventListener("abort", abort);
  };
}

/** The wait before try number `failures` + 1: it doubles from 100 ms to 5 s, and half of it is random. */
export function backoff(failures: number): number {
  const longest = Math.min(100 * 2 ** Math.min(failures - 1, 10), 5000);
  return longest / 2 + (Math.random() * longest) / 2;
}
