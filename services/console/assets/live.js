// Keeps a page up to date. One tab of a browser holds the stream of news and tells the others: a browser
// keeps few connections to one server. A tab that hears of a topic of its page fetches the page again,
// and exchanges the parts that have changed.
const topics = new Set(document.body.dataset.topics.split(" ").filter(Boolean));
const line = document.getElementById("line");
const channel = new BroadcastChannel("fiec-news");
let heard = Date.now(), seen = 0, due = null, fetching = false, again = false, old = "";

function say(text, lost) {
  if (line.textContent !== text) line.textContent = text;
  line.classList.toggle("lost", !!lost);
}

function concerns(news) {
  if (news === "all") return topics.size > 0;
  const [kind, ...ids] = news.split(" ");
  if (kind !== "executions") return topics.has(kind);
  return topics.has("executions") || ids.some((id) => topics.has("execution:" + id));
}

function hear(news) {
  heard = Date.now();
  say(old || "live", old);
  if (news === "alive" || !concerns(news)) return;
  if (document.hidden || fetching) { again = true; return; }
  plan();
}

async function look() {
  due = null;
  if (fetching) { again = true; return; }
  fetching = true;
  try {
    const answer = await fetch(location.href, { headers: { accept: "text/html" }, signal: AbortSignal.timeout(20000) });
    if (!answer.ok) throw new Error(await answer.text());
    exchange(new DOMParser().parseFromString(await answer.text(), "text/html"));
    old = "";
  } catch (error) {
    // The page stays as it was, and says so.
    again = true;
    old = `this page is old: ${error.message.slice(0, 200)}`;
  }
  say(old || "live", old);
  fetching = false;
  seen = Date.now();
  if (again) setTimeout(() => { if (again && !document.hidden) plan(); }, 1000);
}

// At most one look a second: what comes meanwhile is seen with the next one.
function plan() {
  again = false;
  due ??= setTimeout(look, Math.max(250, seen + 1000 - Date.now()));
}

function exchange(fresh) {
  for (const part of document.querySelectorAll("[data-live]")) {
    const other = fresh.getElementById(part.id);
    if (!other || part.contains(document.activeElement) && part.querySelector("input:focus")) continue;
    const open = [...part.querySelectorAll("details[open]")].map((d) => d.id);
    for (const id of open) other.querySelector("#" + CSS.escape(id))?.setAttribute("open", "");
    times(other);
    if (part.innerHTML !== other.innerHTML) {
      const focus = document.activeElement?.closest("[href]")?.getAttribute("href");
      const had = part.contains(document.activeElement);
      part.replaceChildren(...other.childNodes);
      if (had && focus) part.querySelector(`[href="${CSS.escape(focus)}"]`)?.focus();
    }
  }
  for (const part of document.querySelectorAll("[data-live-names]")) {
    const other = fresh.getElementById(part.id);
    if (other && other.dataset.liveNames !== part.dataset.liveNames) part.replaceWith(other);
  }
  for (const part of document.querySelectorAll("[data-live-attr]")) {
    const name = part.dataset.liveAttr, other = fresh.getElementById(part.id);
    if (other && other.getAttribute(name) !== part.getAttribute(name)) part.setAttribute(name, other.getAttribute(name));
  }
  document.dispatchEvent(new Event("fiec:fresh"));
}

// Times in the reader's own zone: the hour today, the day too before.
function times(root) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    const at = new Date(time.dateTime);
    if (isNaN(at)) continue;
    const today = at.toDateString() === new Date().toDateString();
    time.textContent = today ? at.toLocaleTimeString() : at.toLocaleString();
    time.title = time.dateTime;
  }
}

times(document);
for (const link of document.querySelectorAll("[data-json]")) {
  const url = new URL(location.href);
  url.searchParams.set("format", "json");
  link.href = url;
}
channel.onmessage = (event) => hear(event.data);
// Holds the stream until it is closed for good, as by a console that has started anew; then somebody else
// may try.
function hold() {
  navigator.locks.request("fiec-news", () => new Promise((give) => {
    const stream = new EventSource("/events");
    stream.onmessage = (event) => { channel.postMessage(event.data); hear(event.data); };
    stream.onerror = () => { if (stream.readyState === EventSource.CLOSED) give(); };
  })).finally(() => setTimeout(hold, 3000));
}
hold();
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && again) plan();
});
setInterval(() => {
  const silent = Math.round((Date.now() - heard) / 1000);
  if (silent > 12) say(`no connection to the console for ${silent} s`, true);
}, 1000);
