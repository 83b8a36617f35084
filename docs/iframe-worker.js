// Search from a disk: browsers start no worker from a file, so the search worker runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => Promise.all(urls.map(load));
      function load(src) {
        return new Promise((done, fail) => {
          const script = inside.document.createElement("script");
          Object.assign(script, { src, onload: done, onerror: fail });
          inside.document.head.append(script);
        });
      }
      const loaded = load(new URL(url, document.baseURI).href);
      this.postMessage = (data) => loaded.then(() => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
