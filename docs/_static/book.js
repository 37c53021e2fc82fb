// A button on each block of code that copies it, without the prompts and outputs that stand in blocks of their own.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight")) {
    const code = block.querySelector("pre");
    if (!code) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    block.append(button);
  }
});

// The figure of learn/README.md says how tall it is, so that it has no scroll bar of its own.
addEventListener("message", (event) => {
  for (const frame of document.querySelectorAll("iframe.play")) {
    if (event.source === frame.contentWindow && Number.isFinite(event.data?.paceline)) frame.style.height = `${event.data.paceline + 4}px`;
  }
});
