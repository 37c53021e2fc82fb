// How the search orders what it finds. The weights are Sphinx's own; on top, a page or a heading that begins with the words
// searched for, or has them as words, comes before pages that mention them.
var Scorer = {
  score: ([, title, anchor, , score]) => {
    const words = (new URLSearchParams(location.search).get("q") ?? "").trim().toLowerCase();
    if (!words) return score;
    const name = title.split(" > ").pop().toLowerCase();
    const place = ` ${name}`.search(new RegExp(`[^a-z0-9]${words.replace(/[^a-z0-9 ]/g, ".")}`));
    return score + (place < 0 ? 0 : place === 0 ? 20 : 10) + (anchor ? 0 : 1);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
