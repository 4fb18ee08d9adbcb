// The site's search without a browser, for test_search.py:  node search.js nbs/site/theme/search.html INDEX < QUERIES
// INDEX: search.json of a built site, or documents like its own. QUERIES: a JSON list. Prints the pages that each finds, in order.
const fs = require("fs"), vm = require("vm");
const [script, index] = process.argv.slice(2).map(f => fs.readFileSync(f, "utf-8"));
const code = script.match(/<script>([^]*)<\/script>/)[1];
const page = vm.createContext({ fetch: async () => ({ json: async () => JSON.parse(index) }), offsetURL: f => f });
vm.runInContext(code, page);
const pages = found => [...new Set(found.map(o => o.href.split(".html")[0]))];
(async () => {
  const sections = await page.readSearchData(), res = {};
  for (const q of JSON.parse(fs.readFileSync(0, "utf-8"))) res[q] = pages(await page.fuseSearch(q, sections, { limit: 40 }));
  console.log(JSON.stringify(res));
})();
