// What the server says, as Server-Sent Events. EventSource cannot show a key, so fetch reads them.

const KEY = "key";
const PAUSES_MS = [500, 1000, 2000, 5000];
// A look comes each second, and each few where the server has much to do.
const SILENCE_MS = 6000;

export class DeniedError extends Error {
  constructor(status, words) {
    super(words);
    this.status = status;
  }
}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function open(path, signal) {
  const answer = await fetch(path, { headers: headers(), signal, cache: "no-store", credentials: "omit" });
  if (answer.status === 401 || answer.status === 403) throw new DeniedError(answer.status, (await answer.text()).trim());
  return answer;
}

/** Ask once; errors of the server are in the answer's `error`. */
export async function look(path, signal) {
  const answer = await open(path, signal);
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}

/**
 * Follow a path until the signal says otherwise; `on` hears `data(value)`, `gone(words, retryInMs)` and
 * `denied(error)`, after which it ends.
 */
export async function follow(path, signal, on) {
  let failures = 0;
  while (!signal.aborted) {
    let words = "it does not answer";
    // The fetch of one try, which silence ends too.
    const attempt = new AbortController();
    const end = () => attempt.abort();
    signal.addEventListener("abort", end);
    let watchdog;
    const alive = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(end, SILENCE_MS);
    };
    try {
      alive();
      const answer = await open(path, attempt.signal);
      if (answer.ok) {
        for await (const data of events(answer.body)) {
          alive();
          failures = 0;
          if (signal.aborted) return;
          on.data(JSON.parse(data));
        }
        words = "it has ended the connection";
      } else words = (await answer.text()).trim();
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof DeniedError) {
        on.denied(error);
        return;
      }
      if (!(error instanceof TypeError) && error.name !== "AbortError") throw error;
    } finally {
      clearTimeout(watchdog);
      signal.removeEventListener("abort", end);
      attempt.abort();
    }
    const pause = PAUSES_MS[Math.min(failures, PAUSES_MS.length - 1)];
    failures += 1;
    on.gone(words, pause);
    await sleep(pause, signal);
  }
}

function sleep(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const event = text.slice(0, end);
      text = text.slice(end + 2);
      if (event.startsWith("data: ")) yield event.slice(6);
    }
  }
}
