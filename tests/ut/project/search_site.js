// Search a built site as the browser does: `node search_site.js SITE QUERY...`. Prints JSON.
// Runs the site's own search worker with the functions of a web worker that it calls.
"use strict"
const fs = require("fs")
const path = require("path")
const vm = require("vm")

const [site, ...queries] = process.argv.slice(2)
const scripts = path.join(site, "assets", "javascripts")
const workers = path.join(scripts, "workers")
const [SETUP, READY, QUERY, RESULT] = [0, 1, 2, 3]

let handle
const answers = []
const context = vm.createContext({
  addEventListener: (_, listener) => { handle = listener },
  postMessage: message => answers.push(message),
  importScripts: (...names) => names.forEach(name => run(path.join(workers, name))),
  console: { warn: () => {}, log: () => {} },
})
context.self = context.window = context.globalThis = context

function run(file) {
  vm.runInContext(fs.readFileSync(file, "utf8"), context, { filename: file })
}

async function main() {
  run(path.join(workers, fs.readdirSync(workers).find(name => /^search\..*\.js$/.test(name))))
  const index = JSON.parse(fs.readFileSync(path.join(site, "search", "search_index.json"), "utf8"))
  await handle({ data: { type: SETUP, data: { ...index, options: { suggest: false } } } })
  if (answers.pop().type !== READY) throw new Error("the worker is not ready")
  const found = {}
  for (const query of queries) {
    await handle({ data: { type: QUERY, data: query } })
    const { type, data } = answers.pop()
    if (type !== RESULT) throw new Error("the worker has no result")
    found[query] = data.items.map(items => items.map(item => item.location))
  }
  console.log(JSON.stringify(found))
}

main()
