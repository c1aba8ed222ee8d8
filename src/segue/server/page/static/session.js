// A realtime session that outlives its connection, and the key that opens the server.

const RETRY_MS = [100, 300, 1000, 2000, 5000];
const UNAUTHORIZED = 401;

export const key = {
  get: () => sessionStorage.getItem("segue-key"),
  set: (value) => sessionStorage.setItem("segue-key", value),
  headers: () => (key.get() ? { authorization: `Bearer ${key.get()}` } : {}),
};

/** A subprotocol has no "/" and no "=" in it; a key may. */
function base64url(text) {
  const bytes = String.fromCharCode(...new TextEncoder().encode(text));
  return btoa(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

export class Session {
  /** `on.event(event)`, `on.state("open" | "lost")` and `on.needsKey()` are called as things happen. */
  constructor(on) {
    this.on = on;
    this.id = null;
    this.lastEventId = null;
    this.waiting = [];
    this.attempt = 0;
    this.connect();
  }

  connect() {
    const query = new URLSearchParams();
    if (this.id) query.set("session_id", this.id);
    if (this.lastEventId) query.set("last_event_id", this.lastEventId);
    const url = new URL(`/v1/realtime?${query}`, location.href);
    url.protocol = url.protocol.replace("http", "ws");
    const protocols = ["realtime"];
    if (key.get()) protocols.push(`segue-api-key.${base64url(key.get())}`);
    this.socket = new WebSocket(url, protocols);
    this.socket.onopen = () => this.opened();
    this.socket.onmessage = (message) => this.received(JSON.parse(message.data));
    this.socket.onclose = () => this.closed();
  }

  opened() {
    this.on.state("open");
    for (const event of this.waiting.splice(0)) this.socket.send(event);
  }

  received(event) {
    if (event.type === "error" && event.error.code === "session_not_found") {
      this.id = this.lastEventId = null; // it has timed out; the next connection is a new session
    } else {
      this.attempt = 0;
      this.lastEventId = event.event_id;
    }
    if (event.type === "session.created") this.id = event.session.id;
    this.on.event(event);
  }

  async closed() {
    if (this.isOver) return;
    this.on.state("lost");
    const refused = await fetch("/v1/models", { headers: key.headers() }).catch(() => null);
    if (refused?.status === UNAUTHORIZED) {
      await this.on.needsKey();
      this.connect();
      return;
    }
    const delay = RETRY_MS[Math.min(this.attempt++, RETRY_MS.length - 1)];
    setTimeout(() => this.connect(), delay);
  }

  send(type, fields = {}) {
    const event = JSON.stringify({ type, ...fields });
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(event);
    else this.waiting.push(event);
  }

  end() {
    this.isOver = true;
    this.socket.close();
  }
}
