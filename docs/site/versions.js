// Fills the list of versions from versions.json, which stands beside the folders of all versions. Without a server there is only this one.
addEventListener("DOMContentLoaded", async () => {
  const select = document.getElementById("version");
  if (!select) return;
  const { root, page } = select.dataset;
  const current = select.value;
  const answer = await fetch(`${root}/versions.json`).catch(() => null);
  if (!answer?.ok) return;
  const { latest, versions } = await answer.json();
  select.replaceChildren(...versions.map((name) => new Option(name, name, false, name === current)));
  document.getElementById("newer").hidden = versions.indexOf(current) <= versions.indexOf(latest);
  select.addEventListener("change", async () => {
    const folder = `${root}/${select.value}/`;
    const same = await fetch(folder + page, { method: "HEAD" }).catch(() => null);
    location.href = folder + (same?.ok ? page : "index.html");
  });
});
