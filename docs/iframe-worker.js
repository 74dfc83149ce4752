/* Search in pages that are read from a disk. Browsers refuse workers there, so the script of the search's worker
   runs in a hidden frame. The offline plugin of mkdocs-material finds this file by its name; without it the
   plugin's own is taken from the network. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inside.document.createElement("script");
      this.loaded = new Promise((resolve) => script.addEventListener("load", resolve));
      script.src = url;
      this.inside.document.body.append(script);
    }
    async postMessage(data) {
      await this.loaded;
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }
  };
}
