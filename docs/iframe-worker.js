// Pages opened from disk may start no worker, and search runs in one: there it runs in a hidden frame instead.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.waiting = [];
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const inside = this.frame.contentWindow;
    inside.document.open();
    // what the script says is heard here, after it has gone on as it would in a worker
    inside.postMessage = (data) => setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })));
    const script = inside.document.createElement("script");
    script.src = new URL(url, location.href);
    script.onload = () => {
      this.ready = true;
      this.waiting.splice(0).forEach((data) => this.postMessage(data));
    };
    script.onerror = () => this.dispatchEvent(new ErrorEvent("error", { message: `${url} was not loaded` }));
    inside.document.write("<!doctype html><body></body>");
    inside.document.close();
    inside.document.body.append(script);
  }

  postMessage(data) {
    if (this.ready) this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    else this.waiting.push(data);
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
