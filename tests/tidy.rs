//! Rules of the tree that no compiler checks: who may import whom, where `unsafe` may stand, what
//! the guides name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Level of a module of the crate `feedline`: it imports from levels below. Between crates the
/// compiler sees to it.
const LEVELS: &[(&str, u32)] = &[
    ("order", 0),
    ("dlpack", 0),
    ("dataset", 1),
    ("batch", 1),
    ("pipeline", 2),
    ("state", 2),
    ("loader", 3),
];

/// The only files that may hold `unsafe`.
const UNSAFE: &[&str] = &[
    "benches/starvation/device.rs",
    "examples/profile/gpu.rs",
    "python/native/lent.rs",
    "python/native/lib.rs",
    "python/native/stream.rs",
    "python/native/tensor.rs",
    "python/native/xla.rs",
    "crates/device/src/cuda/copy.rs",
    "crates/device/src/cuda/cufile/api.rs",
    "crates/device/src/cuda/cufile/mod.rs",
    "tests/common/turbojpeg.rs",
    "crates/device/src/cuda/cufile/tests.rs",
    "crates/device/src/cuda/direct.rs",
    "crates/device/src/cuda/driver.rs",
    "crates/device/src/cuda/driver/objects.rs",
    "crates/device/src/cuda/driver/simulated.rs",
    "crates/device/src/cuda/interop.rs",
    "crates/device/src/cuda/kernels.rs",
    "crates/device/src/stream.rs",
    "src/dlpack.rs",
    "crates/image/src/resize/avx2.rs",
    "crates/jpeg/src/avx2.rs",
    "crates/core/src/memory/packed.rs",
    "crates/base/src/process.rs",
    "crates/core/src/memory/region.rs",
    "crates/core/src/memory/ring.rs",
    "crates/core/src/memory/row.rs",
    "crates/core/src/memory/slot.rs",
    "crates/report/src/meter/nvtx.rs",
    "src/pipeline/direct.rs",
    "crates/reader/src/mmap.rs",
    "crates/reader/src/syscalls.rs",
    "crates/reader/src/uring/ring.rs",
    "tests/alone/allocations.rs",
    "tests/behaviour/dlpack.rs",
    "tests/common/cuda.rs",
    "tests/common/cufile.rs",
    "tests/common/doubles.rs",
    "tests/common/driver.rs",
    "tests/common/kernels.rs",
    "tests/common/standin.rs",
    "tests/device/cuda/captures.rs",
    "tests/device/cuda/devices.rs",
    "tests/device/cuda/streams.rs",
    "tests/device/cuda_faults.rs",
    "tests/device/kernels.rs",
    "tests/device/profile_gpu.rs",
    "tests/device/standin.rs",
    "tests/faults/real/seccomp.rs",
    "tests/faults/real/sys.rs",
    "tests/gpu/machine.rs",
    "tests/gpu/stand.rs",
    "tests/standin/cuda.rs",
    "tests/standin/cufile.rs",
    "tests/standin/nvml.rs",
    "tests/standin/nvtx.rs",
];

/// The folder of the repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn files(dir: &str) -> Vec<PathBuf> {
    let mut out = Vec::new();
    let mut todo = vec![root().join(dir)];
    while let Some(path) = todo.pop() {
        for entry in std::fs::read_dir(&path).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                todo.push(path);
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                out.push(path);
            }
        }
    }
    out.sort();
    out
}

fn name(path: &Path) -> String {
    path.strip_prefix(root()).unwrap().display().to_string()
}

/// The source folders of all crates of the workspace.
fn crates() -> Vec<String> {
    let folder = root().join("crates");
    let entries = std::fs::read_dir(folder).unwrap().flatten();
    let folders = entries.filter(|entry| entry.path().is_dir());
    let names = folders.map(|entry| entry.file_name().into_string().unwrap());
    let mut all: Vec<_> = names.map(|name| format!("crates/{name}/src")).collect();
    all.push("src".into());
    all.sort();
    all
}

fn module_of(name: &str) -> Option<&str> {
    name.strip_prefix("src/")?.split(['/', '.']).next()
}

/// Code without comments; strings stay.
fn code(text: &str) -> String {
    text.lines()
        .map(|line| {
            if line.trim_start().starts_with("//") {
                ""
            } else {
                line
            }
        })
        .collect::<Vec<_>>()
        .join("\n")
}

#[test]
fn modules_import_only_from_below() {
    let level = |module: &str| {
        LEVELS
            .iter()
            .find(|(name, _)| *name == module)
            .map(|(_, level)| *level)
    };
    let mut wrong = Vec::new();
    for path in files("src") {
        let name = name(&path);
        let facade = ["lib", "decode", "device", "prepare", "storage"];
        let Some(from) = module_of(&name).filter(|module| !facade.contains(module)) else {
            continue;
        };
        let own =
            level(from).unwrap_or_else(|| panic!("{name} is in no level: add it to the table"));
        let text = code(&std::fs::read_to_string(&path).unwrap());
        for (at, _) in text.match_indices("crate::") {
            let to: String = text[at + 7..]
                .chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect();
            let Some(other) = level(&to) else { continue };
            if to != from && other >= own {
                wrong.push(format!("{name} imports {to}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// What comes before the tests at the end of a file.
fn without_tests(text: &str) -> &str {
    let end = ["#[cfg(test)]\nmod ", "#[cfg(test)]\n#[path"]
        .iter()
        .filter_map(|start| text.find(start))
        .min();
    &text[..end.unwrap_or(text.len())]
}

/// A file of a crate by its place in the tree of modules: `["storage", "uring"]`.
type Module = Vec<String>;

/// The code of every file of a source folder that users build, without its tests.
fn modules(src: &str) -> BTreeMap<Module, String> {
    let module = |path: &Path| {
        let name = name(path);
        let mut parts: Module = name[src.len() + 1..]
            .trim_end_matches(".rs")
            .split('/')
            .map(String::from)
            .collect();
        parts.pop_if(|last| ["mod", "lib"].contains(&last.as_str()));
        parts
    };
    let texts: BTreeMap<_, _> = files(src)
        .iter()
        .map(|path| (module(path), code(&std::fs::read_to_string(path).unwrap())))
        .collect();
    let is_test = |module: &Module| {
        let Some((own, parent)) = module.split_last() else {
            return false;
        };
        let parent = texts.get(parent).map_or("", String::as_str);
        let line = format!("mod {own};");
        let before = parent.find(&line).map_or("", |at| &parent[..at]);
        // Between the attribute and the module may be another attribute and `pub`.
        before
            .lines()
            .rev()
            .take(3)
            .any(|line| line.starts_with("#[cfg(test)]"))
    };
    let built = texts
        .iter()
        .filter(|(module, _)| !(1..=module.len()).any(|n| is_test(&module[..n].to_vec())));
    built
        .map(|(module, text)| (module.clone(), without_tests(text).to_string()))
        .collect()
}

/// The paths of `use a::{b, c::d};`, each in full.
fn spread(prefix: &str, tree: &str, found: &mut Vec<String>) {
    let mut depth = 0;
    let mut start = 0;
    for (at, letter) in tree.char_indices().chain([(tree.len(), ',')]) {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let item = tree[start..at].trim();
                start = (at + 1).min(tree.len());
                match item.split_once('{') {
                    Some((path, rest)) => spread(
                        &format!("{prefix}{}", path.trim()),
                        rest.trim_end().trim_end_matches('}'),
                        found,
                    ),
                    None => found.push(format!("{prefix}{}", item.split(" as ").next().unwrap())),
                }
            }
            _ => {}
        }
    }
}

/// The files that a file names: in `use` and in paths from `crate` or `super`. Not those that hold
/// it, which pass on the names of what they hold.
fn named(own: &Module, text: &str, all: &BTreeMap<Module, String>) -> BTreeSet<Module> {
    let mut paths = Vec::new();
    for part in text.split("use ").skip(1) {
        spread("", part.split(';').next().unwrap(), &mut paths);
    }
    for start in ["crate::", "super::"]
        .iter()
        .flat_map(|word| text.match_indices(word))
        .map(|(at, _)| at)
    {
        paths.push(
            text[start..]
                .chars()
                .take_while(|c| c.is_alphanumeric() || "_:".contains(*c))
                .collect(),
        );
    }
    let mut files = BTreeSet::new();
    for path in &paths {
        let mut place = own.clone();
        let mut words = path.split("::").peekable();
        match words.peek() {
            Some(&"crate") => place.clear(),
            Some(&"super" | &"self") => {}
            _ => continue,
        }
        for word in words {
            match word {
                "crate" | "self" => {}
                "super" => drop(place.pop()),
                word => place.push(word.into()),
            }
        }
        while !place.is_empty() && !all.contains_key(&place) {
            place.pop();
        }
        if !own.starts_with(&place) {
            files.insert(place);
        }
    }
    files
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    let counts = crates().into_iter().map(|src| {
        let (arrows, left) = circles(&modules(&src));
        assert!(left.is_empty(), "{src}: {left:#?}");
        arrows
    });
    let count: usize = counts.sum();
    assert!(
        count > 400,
        "{count} imports were found: the test does not see them"
    );
}

/// The number of imports, and the files in circles with those that they name.
fn circles(all: &BTreeMap<Module, String>) -> (usize, BTreeMap<Module, BTreeSet<Module>>) {
    let mut arrows: BTreeMap<_, _> = all
        .iter()
        .map(|(module, text)| (module.clone(), named(module, text, all)))
        .collect();
    let count: usize = arrows.values().map(BTreeSet::len).sum();
    loop {
        // Files that name no other, and files that no other names, lie in no circle.
        let named: BTreeSet<_> = arrows.values().flatten().cloned().collect();
        let ends: Vec<_> = arrows.keys().cloned().collect();
        let ends: Vec<_> = ends
            .into_iter()
            .filter(|own| arrows[own].is_empty() || !named.contains(own))
            .collect();
        if ends.is_empty() {
            break;
        }
        arrows.retain(|module, _| !ends.contains(module));
        arrows
            .values_mut()
            .for_each(|files| files.retain(|file| !ends.contains(file)));
    }
    (count, arrows)
}

#[test]
fn unsafe_blocks_stand_in_listed_files_and_give_a_reason() {
    let mut wrong = Vec::new();
    let mut met = BTreeSet::new();
    for path in ["src", "crates", "tests", "benches", "examples", "python"]
        .into_iter()
        .flat_map(files)
    {
        let name = name(&path);
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            let bare = line.split("//").next().unwrap_or("");
            let word = bare.contains("unsafe {")
                || bare.contains("unsafe impl")
                || bare.contains("unsafe fn");
            if !word || name == "tests/tidy.rs" {
                continue;
            }
            met.insert(name.clone());
            if !UNSAFE.contains(&name.as_str()) {
                wrong.push(format!("{name}:{} holds unsafe", index + 1));
            }
            let argued = bare.contains("unsafe fn")
                || lines[index.saturating_sub(8)..index]
                    .iter()
                    .any(|line| line.contains("SAFETY:"));
            if !argued {
                wrong.push(format!("{name}:{} has no SAFETY comment", index + 1));
            }
        }
    }
    wrong.extend(
        UNSAFE
            .iter()
            .filter(|name| !met.contains(**name))
            .map(|name| format!("{name} holds none: unlist it")),
    );
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// What starts threads. `thread.rs` alone has it, since it names the limits where one is refused;
/// and the file whose runtime starts its own, for which it makes sure of room.
const STARTS: &[&str] = &[
    "std::thread::spawn",
    "std::thread::Builder",
    "scope.spawn(",
    "ThreadPoolBuilder",
    "runtime::Builder",
];
const STARTERS: &[&str] = &["crates/base/src/thread.rs", "crates/remote/src/store.rs"];

#[test]
fn one_file_starts_threads() {
    let mut wrong = Vec::new();
    for path in ["src", "crates", "python/native"]
        .into_iter()
        .flat_map(files)
    {
        let name = name(&path);
        if name.contains("tests") || name.contains("/scenarios/") {
            continue;
        }
        let text = code(&std::fs::read_to_string(&path).unwrap());
        let built = without_tests(&text).split("#[test]").next().unwrap();
        let starts = STARTS.iter().filter(|word| built.contains(**word));
        wrong.extend(starts.map(|word| format!("{name}: {word}")));
    }
    wrong.retain(|line| !STARTERS.iter().any(|name| line.starts_with(name)));
    assert!(
        wrong.is_empty(),
        "start threads by crate::thread:\n{wrong:#?}"
    );
}

/// What opens, lists or looks at files by itself. Datasets ask `storage` for a blob or a listing,
/// so that a source may be something else than a file; what they write goes through
/// `storage::publish`.
const FILE_SYSTEM: &[&str] = &[
    "std::fs",
    "std::os::unix::fs",
    "std::os::fd",
    "rustix::",
    "File::",
    "FileExt",
    "glob::",
    ".canonicalize()",
    ".exists()",
    ".is_dir()",
    ".is_file()",
    ".metadata()",
    ".read_dir()",
];

#[test]
fn datasets_and_prepare_open_no_path_themselves() {
    let mut wrong = Vec::new();
    let fences = [
        ("src", Some("dataset")),
        ("crates/core/src", Some("dataset")),
        ("crates/formats/src", None),
        ("crates/parquet/src", None),
        ("crates/prepare/src", None),
        ("crates/text/src", None),
    ];
    for (src, top) in fences {
        let modules = modules(src);
        let fenced =
            |module: &&Module| top.is_none_or(|top| module.first().is_some_and(|own| own == top));
        for module in modules.keys().filter(fenced) {
            let own = modules[module]
                .lines()
                .enumerate()
                .flat_map(|(line, text)| {
                    let words = FILE_SYSTEM.iter().filter(move |word| text.contains(**word));
                    words.map(move |word| {
                        format!("{src}/{}:{} has {word}", module.join("/"), line + 1)
                    })
                });
            wrong.extend(own);
        }
    }
    assert!(
        wrong.is_empty(),
        "ask feedline_core::storage for a Blob, a listing, or publish:\n{wrong:#?}"
    );
}

/// Calls that open a path, and the only files of the storage that may have them. Data files are
/// opened by `opened` and, with its check, by `uring`; `blob` opens what is indexed anew.
const OPENS: &[(&str, &[&str])] = &[
    (
        "rustix::fs::open(",
        &[
            "crates/core/src/storage/blob",
            "crates/core/src/storage/opened",
            "crates/core/src/storage/resolve_beneath",
        ],
    ),
    (
        "openat2(",
        &[
            "crates/reader/src/files",
            "crates/core/src/storage/resolve_beneath",
        ],
    ),
    ("openat(", &["crates/core/src/storage/resolve_beneath"]),
    ("opcode::OpenAt", &["crates/reader/src/uring/ring"]),
    (
        "File::open(",
        &[
            "crates/core/src/storage/publish",
            "crates/reader/src/uring/crowd",
            "crates/remote/src/shared",
        ],
    ),
    (
        "File::options()",
        &[
            "crates/core/src/storage/publish",
            "crates/remote/src/shared",
        ],
    ),
    ("OpenOptions::new()", &["crates/store/src/cache/rights"]),
    ("fs::read(", &["crates/remote/src/profile"]),
];

#[test]
fn data_files_are_opened_where_their_version_is_checked() {
    let mut wrong = Vec::new();
    for (src, top) in [
        ("crates/reader/src", None),
        ("crates/store/src", None),
        ("crates/core/src", Some("storage")),
        ("crates/remote/src", None),
    ] {
        for (module, text) in modules(src) {
            if top.is_some_and(|top| module.first().is_none_or(|own| own != top)) {
                continue;
            }
            let module = format!("{src}/{}", module.join("/"));
            let own = |at: usize| !text[..at].ends_with(char::is_alphanumeric);
            let has = |call: &str| text.match_indices(call).any(|(at, _)| own(at));
            let calls = OPENS
                .iter()
                .filter(|(call, owners)| has(call) && !owners.contains(&module.as_str()));
            wrong.extend(calls.map(|(call, _)| format!("{module} has {call}")));
        }
    }
    assert!(
        wrong.is_empty(),
        "open data files by `opened::open_indexed` or `Files::get`:\n{wrong:#?}"
    );
}

#[test]
fn the_map_in_the_guide_names_every_folder_of_src() {
    let root = root().join("src");
    let guide = std::fs::read_to_string(root.join("guide/architecture.md")).unwrap();
    let map = guide
        .split("## Map of `src/`")
        .nth(1)
        .expect("the guide has a map")
        .split("\n## ")
        .next()
        .unwrap();
    let map: String = map.lines().filter(|line| line.starts_with('|')).collect();
    let rows: BTreeSet<_> = map
        .split('`')
        .skip(1)
        .step_by(2)
        .map(|row| root.join(row))
        .collect();
    let parents = files("src")
        .into_iter()
        .filter(|path| !path.ends_with("tests.rs"))
        .map(|path| path.parent().unwrap().to_path_buf());
    let top = files("src")
        .into_iter()
        .filter(|path| path.parent() == Some(&root));
    let expected: BTreeSet<_> = parents
        .filter(|folder| *folder != root)
        .chain(top)
        .collect();
    let differ: Vec<_> = rows
        .symmetric_difference(&expected)
        .map(|path| name(path))
        .collect();
    assert!(
        differ.is_empty(),
        "edit the section Map of src/ in src/guide/architecture.md: {differ:#?}"
    );
}

#[test]
fn every_file_of_src_says_what_it_does() {
    let text = |path: &PathBuf| std::fs::read_to_string(path).unwrap();
    let silent: Vec<_> = ["src", "crates"]
        .into_iter()
        .flat_map(files)
        .filter(|path| !text(path).starts_with("//! "))
        .collect();
    assert!(silent.is_empty(), "begin with `//! `: {silent:#?}");
}

#[test]
fn no_doc_test_uses_what_only_tests_have() {
    let only_tests = ["unstable::", "cufile_at(", "cufile_any_route("];
    let in_docs = |line: &&str| line.trim_start().starts_with("//");
    let docs = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).unwrap();
        let docs: Vec<_> = text.lines().filter(in_docs).collect();
        (name(&path), docs.join("\n"))
    };
    for (name, docs) in ["src", "crates"].into_iter().flat_map(files).map(docs) {
        let found = only_tests.iter().find(|word| docs.contains(**word));
        assert!(found.is_none(), "{name}: {found:?}");
    }
}

/// The string literals of code that users build, with their lines: not those of attributes, and not
/// the messages of broken invariants.
fn messages(code: &str) -> Vec<(usize, String)> {
    const INVARIANTS: [&str; 10] = [
        "expect(",
        "panic!(",
        "assert!(",
        "assert_eq!(",
        "unreachable!(",
        "reason = ",
        "doc = ",
        "feature = ",
        "expect_used",
        "fault_hook",
    ];
    let mut found = Vec::new();
    let mut rest = code;
    let mut line = 1;
    while let Some(start) = rest.find(['"', '\'']) {
        let (before, from) = rest.split_at(start);
        line += before.matches('\n').count();
        let raw = before.len() - before.trim_end_matches('#').len();
        let is_raw = before[..before.len() - raw].ends_with('r') && from.starts_with('"');
        let len = match (from.as_bytes()[0], is_raw) {
            // 'x' and '\n' are letters; 'a alone is a lifetime.
            (b'\'', _) if from[1..].starts_with('\\') => {
                from[2..].find('\'').map_or(1, |end| from[3 + end..].len())
            }
            (b'\'', _) => {
                let letter = from[1..].chars().next().map_or(1, char::len_utf8);
                if from[1 + letter..].starts_with('\'') {
                    from[2 + letter..].len()
                } else {
                    from[1..].len()
                }
            }
            (_, true) => from[1..]
                .find(&format!("\"{}", "#".repeat(raw)))
                .map_or(0, |end| from[2 + end + raw..].len()),
            (_, false) => {
                let mut escaped = false;
                let end = from[1..].find(|c| {
                    let ends = c == '"' && !escaped;
                    escaped = c == '\\' && !escaped;
                    ends
                });
                from[2 + end.expect("the literal ends")..].len()
            }
        };
        let after = &from[from.len() - len..];
        let head: String = before
            .chars()
            .rev()
            .take(60)
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
            .collect();
        let head = head.rsplit(['\n', ';']).next().unwrap_or("").trim_start();
        let head = if head.is_empty() {
            before.trim_end().rsplit('\n').next().unwrap_or("")
        } else {
            head
        };
        if from.starts_with('"') && !INVARIANTS.iter().any(|word| head.contains(word)) {
            found.push((
                line,
                from[1..from.len() - len]
                    .trim_end_matches(['"', '#'])
                    .to_string(),
            ));
        }
        line += from[..from.len() - len].matches('\n').count();
        rest = after;
    }
    found
}

/// Whether a text names an item of Rust: a path, a method, or a setting that the table gives a name
/// of its own.
fn names_rust(text: &str, table: &[String]) -> bool {
    let joined = |(at, _): (usize, &str)| {
        let word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        word(text[..at].chars().next_back()) && word(text[at + 2..].chars().next())
    };
    let spans = text.split('`').skip(1).step_by(2);
    text.match_indices("::").any(joined)
        || spans.into_iter().any(|span| {
            span.starts_with('.') || span.contains('(') || table.iter().any(|name| name == span)
        })
}

#[test]
fn messages_name_settings_by_the_table_alone() {
    let table = std::fs::read_to_string(root().join("crates/base/src/setting.rs")).unwrap();
    let rows = table
        .split("settings! {\n")
        .nth(1)
        .unwrap()
        .split("\n}")
        .next()
        .unwrap()
        .lines();
    let table: Vec<String> = rows
        .map(|line| {
            let name = line
                .split('"')
                .nth(1)
                .unwrap()
                .trim_start_matches("tuning(|t| t.");
            name.split("({}")
                .next()
                .unwrap()
                .split("(LastBatch")
                .next()
                .unwrap()
                .to_string()
        })
        .collect();
    let tools =
        ["throughput", "profile", "inspect", "prepare"].map(|tool| format!("examples/{tool}"));
    let dirs = ["src", "crates", "python/native"].map(String::from);
    let mut all: Vec<PathBuf> = dirs
        .iter()
        .chain(&tools)
        .flat_map(|dir| files(dir))
        .collect();
    all.push(root().join("examples/resume.rs"));
    let mut wrong = Vec::new();
    let mut seen = 0;
    for path in all {
        let name = name(&path);
        if name.ends_with("/setting.rs") || name.contains("test") {
            continue;
        }
        let text = code(&std::fs::read_to_string(&path).unwrap());
        for (line, text) in messages(without_tests(&text)) {
            seen += 1;
            if names_rust(&text, &table) {
                wrong.push(format!("{name}:{line}: {text}"));
            }
        }
    }
    assert!(
        seen > 2000,
        "{seen} literals were found: the test does not see them"
    );
    assert!(
        wrong.is_empty(),
        "compose these with Setting of crates/base/src/setting.rs:\n{wrong:#?}"
    );
}

/// Phrases over which readers stumbled in earlier texts.
#[test]
fn texts_for_users_avoid_phrases_that_stopped_readers() {
    let phrases = [
        "supposed to",
        "count apart",
        "limits at",
        "goes on behind",
        "may so ",
        "that is none",
        "takes as much",
        "not ours",
    ];
    let root = root();
    let parts = ["", "/cookbook", "/guide", "/switching"].map(|part| format!("python/docs{part}"));
    let folders = std::iter::once("src/guide".to_owned()).chain(parts);
    let entries = folders.flat_map(|folder| std::fs::read_dir(root.join(folder)).unwrap());
    let guides = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file());
    let pages = ["README.md", "python/README.md"].map(|page| root.join(page));
    for page in guides.chain(pages) {
        let text = std::fs::read_to_string(&page)
            .unwrap()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
            .to_lowercase();
        let found: Vec<_> = phrases
            .iter()
            .filter(|phrase| text.contains(**phrase))
            .collect();
        assert!(found.is_empty(), "{}: {found:?}", page.display());
    }
}

/// Habits that make Rust hard to read, and how often each is left in `src` and `crates`, without
/// tests. The counts may only fall.
const HABITS: &[(&str, usize)] = &[
    ("several values in one `let`", 2),
    ("a tuple as a parameter", 0),
    ("a closure with a name", 426),
];

/// `let (a, b) = (x, y);`, whose head is in one line.
fn binds_several(line: &str) -> bool {
    let is_pattern = |rest: &str| rest.starts_with(|first: char| first.is_ascii_lowercase());
    line.strip_prefix("let (").is_some_and(is_pattern) && line.contains(") = (")
}

/// `(a, b): (A, B),` or `fn name((a, b): (A, B))`.
fn has_tuple_parameter(line: &str) -> bool {
    let in_list = line.starts_with('(') && line.ends_with(',');
    (in_list || line.contains("fn ")) && line.contains("): (")
}

/// `let name = |a| …`.
fn names_closure(line: &str) -> bool {
    let value = line
        .strip_prefix("let ")
        .and_then(|rest| rest.split_once(" = "))
        .map_or("", |(_, value)| value);
    value.starts_with('|') || value.starts_with("move |")
}

#[test]
fn habits_that_make_rust_hard_to_read_only_fall() {
    let count = |has: fn(&str) -> bool| {
        let of_file = |path: PathBuf| {
            let text = code(&std::fs::read_to_string(path).unwrap());
            let built = without_tests(&text);
            built.lines().filter(|line| has(line.trim())).count()
        };
        let is_test = |path: &PathBuf| name(path).contains("test");
        let files = ["src", "crates"].into_iter().flat_map(files);
        let all = files.filter(|path| !is_test(path));
        all.map(of_file).sum::<usize>()
    };
    let counts = [binds_several, has_tuple_parameter, names_closure].map(count);
    for ((habit, known), found) in HABITS.iter().zip(counts) {
        assert!(
            found <= *known,
            "{habit}: {found} times, {known} are allowed (CONTRIBUTING.md, Style)"
        );
        assert!(
            found == *known,
            "{habit}: write {found} into HABITS, not {known}"
        );
    }
}
