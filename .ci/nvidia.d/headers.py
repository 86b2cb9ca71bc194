"""Calls, structures and constants in the Rust sources against NVIDIA's headers: a C++ program of static assertions for each."""

import re
import subprocess
import textwrap

from table import ROOT, SPECS, check, find, finish, folders

CUDA = ROOT / "crates/device/src/cuda"

# Rust's types as C's. `handle` stands for a driver object as a number: any pointer or 8-byte integer of the header's.
SCALARS = {
    "c_int": "int", "c_uint": "unsigned", "c_char": "char", "c_void": "void", "c_ulonglong": "unsigned long long",
    "usize": "handle", "isize": "long", "Handle": "handle", "DevicePtr": "unsigned long long", "f32": "float",
    "f64": "double", "u8": "unsigned char", "i32": "int", "i64": "long", "u16": "unsigned short", "u32": "unsigned",
    "u64": "unsigned long", "()": "void",
}

PRELUDE = """
#include <cstddef>
#include <cstdint>
#include <type_traits>
struct handle { unsigned long number; };

// Whether a value of ours is passed as the header's: width, integer or floating, signedness but for enums, what a pointer
// points to, and that nothing is written through what we take for constant.
template <class M, class T> constexpr bool same() {
    if constexpr (std::is_pointer_v<M> && std::is_pointer_v<T>) {
        using Mine = std::remove_pointer_t<M>;
        using Theirs = std::remove_pointer_t<T>;
        if constexpr (std::is_function_v<Mine> || std::is_function_v<Theirs>) {
            return std::is_function_v<Mine> == std::is_function_v<Theirs>;
        } else if constexpr (std::is_const_v<Mine> && !std::is_const_v<Theirs>) {
            return OURS_CONST_AS_THEIRS;
        } else if constexpr (std::is_void_v<Mine> || std::is_void_v<Theirs>) {
            return true;
        } else {
            return same<std::remove_const_t<Mine>, std::remove_const_t<Theirs>>();
        }
    } else if constexpr (std::is_same_v<M, handle>) {
        return std::is_pointer_v<T> || (std::is_integral_v<T> && sizeof(T) == 8);
    } else if constexpr (std::is_void_v<M> || std::is_void_v<T>) {
        return std::is_void_v<M> && std::is_void_v<T>;
    } else if constexpr (std::is_enum_v<T>) {
        return std::is_integral_v<M> && sizeof(M) == sizeof(T);
    } else if constexpr (std::is_class_v<M> || std::is_class_v<T>) {
        // Ours may have room for what theirs grows by; `layout` compares the rest.
        return std::is_class_v<M> && std::is_class_v<T> && sizeof(M) >= sizeof(T) && alignof(M) == alignof(T);
    } else if constexpr (std::is_pointer_v<M> || std::is_pointer_v<T>) {
        return false;
    } else {
        constexpr bool letter = std::is_same_v<M, char> || std::is_same_v<T, char>;
        return sizeof(M) == sizeof(T) && std::is_floating_point_v<M> == std::is_floating_point_v<T>
            && (letter || std::is_signed_v<M> == std::is_signed_v<T>);
    }
}

template <class M, class T> struct call : std::false_type {};
template <class R, class... M, class S, class... T> struct call<R (*)(M...), S (*)(T...)> {
    static constexpr bool value = [] {
        if constexpr (sizeof...(M) != sizeof...(T)) return false;
        else return same<R, S>() && (same<M, T>() && ...);
    }();
};
"""


def c_type(rust, structs):
    """A type of Rust's as C writes it."""
    rust = rust.strip()
    if rust.startswith("*"):
        kind, rest = rust[1:].split(None, 1)
        return f"{c_type(rest, structs)} {'const' if kind == 'const' else ''}*"
    if rust.startswith(("unsafe extern", "Option<unsafe extern")):
        return "void (*)()"
    return f"mine_{rust}" if rust in structs else SCALARS[rust]


def split(arguments):
    """At the commas outside of parentheses."""
    parts = re.split(r",(?![^(]*\))", arguments)
    return [part for part in map(str.strip, parts) if part]


def uncommented(path):
    return re.sub(r"//.*", "", path.read_text().split("#[cfg(test)]\nmod tests")[0])


def prototype(rust, structs):
    """`unsafe extern "C" fn(A, B) -> R` as C's."""
    arguments, result = re.fullmatch(r'unsafe extern "C" fn\((.*)\)\s*(?:->\s*(.*))?', rust.strip(), re.S).groups()
    arguments = ", ".join(c_type(argument, structs) for argument in split(arguments))
    return f"{c_type(result or '()', structs)} (*)({arguments})"


def structures(text):
    """Structures and unions of `repr(C)`, with their fields in order."""
    found = {}
    for kind, name, body in re.findall(r"#\[repr\(C\)\](?:\s*#\[[^\]]*\])*\s*(?:pub(?:\([^)]*\))? )?(struct|union) (\w+) \{(.*?)\n\}", text, re.S):
        fields = re.findall(r"(?:pub(?:\([^)]*\))? )?(\w+):\s*([^\n]*),\n", body + "\n")
        found[name] = (kind, fields)
    return found


def declare(structs, numbers):
    """The same structures in C: Rust lays them out as C does."""
    out = []
    # Unions and small structures are fields of others: they come first.
    depends = lambda name: sum(other in rust for other in structs for _, rust in structs[name][1])
    for name in sorted(structs, key=depends):
        kind, fields = structs[name]
        lines = []
        for field, rust in fields:
            array = re.fullmatch(r"\[(.*); (\w+)\]", rust)
            kind_of = c_type(array[1] if array else rust, structs).replace("handle", "unsigned long")
            length = f"[{numbers.get(array[2], array[2])}]" if array else ""
            lines.append(f"    void (*{field})();" if kind_of == "void (*)()" else f"    {kind_of} {field}{length};")
        out.append(f"{kind} mine_{name} {{\n" + "\n".join(lines) + "\n};")
    return "\n".join(out)


def constants(text):
    """Numbers of the sources."""
    found = re.findall(r"const (\w+): \w+ = ([\d_]+);", text)
    return {name: int(value.replace("_", "")) for name, value in found}


class Program:
    """Assertions against one version of a header."""

    def __init__(self, header, structs, numbers, loose):
        self.includes = header
        self.lines = [declare(structs, numbers)]
        self.prelude = PRELUDE.replace("OURS_CONST_AS_THEIRS", "true" if loose else "false")
        self.count = 0

    def that(self, condition, words):
        self.lines.append(f'static_assert({condition}, "{words}");')
        self.count += 1

    def calls(self, table):
        for name, mine in table.items():
            self.that(f"call<{mine}, decltype(&{name})>::value", f"{name} takes other arguments")

    def layout(self, mine, theirs, fields, whole=True):
        """`fields`: ours and the header's path."""
        if whole:
            self.that(f"sizeof(mine_{mine}) == sizeof({theirs})", f"{theirs} has another size")
        for own, path in fields.items():
            self.that(f"offsetof(mine_{mine}, {own}) == offsetof({theirs}, {path})", f"{theirs}.{path} lies elsewhere")
            self.that(f"sizeof(mine_{mine}::{own}) == sizeof((({theirs}*)0)->{path})", f"{theirs}.{path} has another size")

    def run(self, what, includes):
        source = "\n".join([self.includes, self.prelude, *self.lines, ""])
        command = ["g++", "-std=c++17", "-Wno-invalid-offsetof", "-fsyntax-only", "-x", "c++", "-"]
        command += [f"-I{folder}" for folder in includes]
        done = subprocess.run(command, input=source, capture_output=True, text=True)
        wrong = re.findall(r"static assertion failed: (.*)|error: (.*)", done.stderr)
        words = "; ".join(dict.fromkeys(first or second for first, second in wrong)) if done.returncode else ""
        check(done.returncode == 0, what, words or f"{self.count} assertions")


def include(folder, header):
    return find(folder, header).parent


def driver():
    text = uncommented(CUDA / "driver.rs")
    files = [text, *(uncommented(CUDA / name) for name in ("driver/objects.rs", "../stream.rs"))]
    numbers = {name: number for file in files for name, number in constants(file).items()}
    table = re.search(r"symbols! \{\n(.*?)\n\}", text, re.S)[1]
    calls = {name: prototype(f'unsafe extern "C" fn({arguments}) -> c_int', {})
             for name, arguments in re.findall(r'\w+: "(\w+)" \((.*)\);', table)}
    assert len(calls) == table.count('"cu'), "a line of the table is not understood"
    same = {
        "EVENT_BLOCKING": "CU_EVENT_BLOCKING_SYNC", "EVENT_NO_TIMING": "CU_EVENT_DISABLE_TIMING",
        "STREAM_NON_BLOCKING": "CU_STREAM_NON_BLOCKING", "SUCCESS": "CUDA_SUCCESS", "NOT_READY": "CUDA_ERROR_NOT_READY",
        "PORTABLE": "CU_MEMHOSTREGISTER_PORTABLE", "RELAXED": "CU_STREAM_CAPTURE_MODE_RELAXED",
    }
    for version, folder in folders("nvidia-cuda-runtime"):
        program = Program('#include "cuda.h"', {}, numbers, loose=False)
        program.calls(calls)
        header = (include(folder, "cuda.h") / "cuda.h").read_text()
        # The header's are pointers, which no constant expression compares.
        for name in ("LEGACY", "PER_THREAD"):
            same[name] = re.search(rf"#define CU_STREAM_{name}\s+\(\(CUstream\)(0x\d+)\)", header)[1]
        for name, theirs in same.items():
            program.that(f"{numbers[name]} == {theirs}", f"{name} is another number")
        program.run(f"driver.rs: {len(calls)} calls, cuda.h {version}", [include(folder, "cuda.h")])
        sticky(text, version, include(folder, "cuda.h") / "cuda.h")


def sticky(text, version, header):
    """Errors of which the header says that the process must end are those that we give up a context for."""
    ours = re.search(r"fn is_sticky.*?matches!\(code, (.*?)\)", text, re.S)[1]
    codes = set()
    for part in ours.split("|"):
        first, _, last = part.strip().partition("..=")
        codes |= set(range(int(first), int(last or first) + 1))
    enum = re.search(r"typedef enum cudaError_enum \{(.*?)\n\}", header.read_text(), re.S)[1]
    ends = {int(code) for words, code in re.findall(r"/\*\*(.*?)\*/\s*\w+\s*=\s*(\d+)", enum, re.S)
            if "must be terminated" in " ".join(words.replace("*", " ").split())}
    missing = sorted(ends - codes)
    check(ends and not missing, f"driver.rs: errors that end a process, cuda.h {version}",
          f"{len(ends)} in the header" + (f", not ours: {missing}" if missing else ""))


def cufile():
    text, counters = uncommented(CUDA / "cufile/api.rs"), uncommented(CUDA / "cufile/stats.rs")
    structs, numbers = structures(text), constants(text) | constants(counters)
    aliases = dict(re.findall(r"type (\w+) = (unsafe extern .*?);", text))
    body = re.search(r"pub\(super\) struct Api \{(.*?)\n\}", text, re.S)[1]
    types = {field: aliases.get(rust, rust) for field, rust in re.findall(r"(\w+): (?:Option<)?((?:unsafe [^\n]*?|Plain))>?,\n", body)}
    symbols = {field: names for field, names in re.findall(r'(\w+): ((?:needed|optional)![^\n]*),', text)}
    newest_only = ("set_level", "level", "start", "stop", "level3")
    cuda = include(folders("nvidia-cuda-runtime")[-1][1], "cuda.h")
    for version, folder in folders("nvidia-cufile"):
        number = tuple(map(int, version.split(".")))
        header = '#include "cufile.h"'
        program = Program(header, structs, numbers, loose=True)
        calls = {}
        for field, rust in types.items():
            if number < (1, 15) and field in newest_only:
                continue
            for name in re.findall(r'"(\w+)"', symbols[field]):
                # The header declares either of the two.
                if name not in ("cuFileDriverClose", "cuFileDriverClose_v2") or name == "cuFileDriverClose":
                    calls[name] = prototype(rust, structs)
        program.calls(calls)
        program.layout("Status", "CUfileError_t", {"code": "err", "cuda": "cu_err"})
        program.layout("Descr", "CUfileDescr_t", {"kind": "type", "handle": "handle", "ops": "fs_ops"})
        program.layout("RawProperties", "CUfileDrvProps_t", {
            "major": "nvfs.major_version", "minor": "nvfs.minor_version", "poll_threshold": "nvfs.poll_thresh_size",
            "max_direct_io": "nvfs.max_direct_io_size", "status": "nvfs.dstatusflags", "control": "nvfs.dcontrolflags",
            "features": "fflags"}, whole=False)
        program.that("sizeof(mine_RawProperties) >= sizeof(CUfileDrvProps_t)", "CUfileDrvProps_t has outgrown its room")
        program.that(f"{numbers['OPAQUE_FD']} == CU_FILE_HANDLE_TYPE_OPAQUE_FD", "OPAQUE_FD is another number")
        if number >= (1, 15):
            start = 1144 if number >= (1, 19) else 1032
            program.that(f"offsetof(CUfileStatsLevel3_t, per_gpu_stats) == {start}", "statistics of GPUs lie elsewhere")
            program.that(f"offsetof(CUfileStatsLevel3_t, num_gpus) == {start - 8}", "the number of GPUs lies elsewhere")
            program.that(f"sizeof(CUfilePerGpuStats_t) == {numbers['GPU']}", "statistics of a GPU have another size")
            program.that(f"sizeof(CUfileStatsLevel3_t) == {start} + {numbers['GPUS_MAX']} * {numbers['GPU']}", "room for more GPUs")
            program.that(f"sizeof(CUfileStatsLevel3_t) < {numbers['ROOM']} * 8", "statistics have outgrown their room")
            places = {"uuid": 0, "read_bytes": 16, "n_total_reads": 48, "n_p2p_reads": 56, "n_nvfs_reads": 64,
                      "n_posix_reads": 72, "n_unaligned_reads": 80}
            for field, place in places.items():
                program.that(f"offsetof(CUfilePerGpuStats_t, {field}) == {place}", f"CUfilePerGpuStats_t.{field} lies elsewhere")
        program.run(f"cufile: {len(calls)} calls, cufile.h {version}", [include(folder, "cufile.h"), cuda])


def dlpack():
    text = uncommented(ROOT / "src/dlpack.rs")
    structs = structures(textwrap.dedent(re.search(r"\npub\(crate\) mod raw \{\n(.*?)\n\}", text, re.S)[1]))
    names = {"DLDevice", "DLDataType", "DLTensor", "DLManagedTensor", "DLPackVersion", "DLManagedTensorVersioned"}
    assert set(structs) == names, f"structures of dlpack.rs: {sorted(structs)}"
    tensor = {name: name for name in ("data", "device", "ndim", "dtype", "shape", "strides", "byte_offset")}
    for version, folder in folders("apache-tvm-ffi"):
        home = find(folder, "dlpack.h").parent
        numbers = dict(re.findall(r"#define (DLPACK_M\w+_VERSION) (\d+)", (home / "dlpack.h").read_text()))
        known = ".".join(numbers[f"DLPACK_{part}_VERSION"] for part in ("MAJOR", "MINOR"))
        program = Program('#include "dlpack.h"', structs, {}, loose=False)
        program.layout("DLDevice", "DLDevice", {"device_type": "device_type", "device_id": "device_id"})
        program.layout("DLDataType", "DLDataType", {"code": "code", "bits": "bits", "lanes": "lanes"})
        program.layout("DLTensor", "DLTensor", tensor)
        program.layout("DLManagedTensor", "DLManagedTensor", {name: name for name in ("dl_tensor", "manager_ctx", "deleter")})
        program.layout("DLPackVersion", "DLPackVersion", {"major": "major", "minor": "minor"})
        program.layout("DLManagedTensorVersioned", "DLManagedTensorVersioned",
                       {name: name for name in ("version", "manager_ctx", "deleter", "flags", "dl_tensor")})
        flags = dict(re.findall(r"const (FLAG_\w+): u64 = (\d+);", text))
        program.that(f"{flags['FLAG_READ_ONLY']} == DLPACK_FLAG_BITMASK_READ_ONLY", "FLAG_READ_ONLY is another bit")
        for name, number in (("kDLCPU", 1), ("kDLCUDA", 2), ("kDLInt", 0), ("kDLUInt", 1), ("kDLFloat", 2), ("kDLBfloat", 4)):
            program.that(f"{name} == {number}", f"{name} is another number")
        program.run(f"dlpack.rs: dlpack.h {known}", [home])


def nvtx():
    text = uncommented(ROOT / "crates/report/src/meter/nvtx.rs")
    for alias, rust in re.findall(r"type (\w+) = (unsafe extern .*?);", text):
        text = re.sub(rf"\b{alias}\b(?! =)", lambda _: rust, text)
    aliases = dict(re.findall(r"type (\w+) = (unsafe extern .*?);", text))
    structs, numbers = structures(text), constants(text)
    calls = {f"nvtxDomain{name}": prototype(aliases[alias], structs) for name, alias in (
        ("CreateA", "CreateDomain"), ("RegisterStringA", "RegisterString"), ("RangeStartEx", "RangeStart"),
        ("RangeEnd", "RangeEnd"), ("RangePushEx", "RangePush"), ("RangePop", "RangePop"))}
    types = {"ExportTable": "NvtxGetExportTableFunc_t", "Initialize": "NvtxInitializeInjectionNvtxFunc_t",
             "ModuleTable": "decltype(NvtxExportTableCallbacks::GetModuleFunctionTable)",
             "SetVersion": "decltype(NvtxExportTableVersionInfo::SetInjectionNvtxVersion)"}
    same = {
        "NVTX_VERSION": "NVTX_VERSION", "CALLBACKS": "NVTX_ETID_CALLBACKS", "VERSION_INFO": "NVTX_ETID_VERSIONINFO",
        "CORE2": "NVTX_CB_MODULE_CORE2", "PAYLOAD_U64": "NVTX_PAYLOAD_TYPE_UNSIGNED_INT64",
        "MESSAGE_ASCII": "NVTX_MESSAGE_TYPE_ASCII", "MESSAGE_REGISTERED": "NVTX_MESSAGE_TYPE_REGISTERED",
    }
    core2 = {"RANGE_START": "RangeStartEx", "RANGE_END": "RangeEnd", "RANGE_PUSH": "RangePushEx", "RANGE_POP": "RangePop",
             "REGISTER_STRING": "RegisterStringA", "CREATE_DOMAIN": "CreateA"}
    same |= {name: f"NVTX_CBID_CORE2_Domain{theirs}" for name, theirs in core2.items()}
    sizes = re.search(r"const SIZES: \[usize; (\d+)\] = \[0, (.*)\];", text)
    modules = ("CORE", "CUDA", "OPENCL", "CUDART", "CORE2", "SYNC")
    for version, folder in folders("nvidia-nvtx"):
        home = find(folder, "nvtx3/nvToolsExt.h").parent
        program = Program('#include "nvToolsExt.h"', structs, numbers, loose=False)
        program.calls(calls)
        for alias, theirs in types.items():
            program.that(f"call<{prototype(aliases[alias], structs)}, {theirs}>::value", f"{alias} takes other arguments")
        program.layout("Event", "nvtxEventAttributes_t", {
            "version": "version", "size": "size", "category": "category", "color_type": "colorType", "color": "color",
            "payload_type": "payloadType", "reserved": "reserved0", "payload": "payload", "message_type": "messageType",
            "message": "message"})
        program.layout("Callbacks", "NvtxExportTableCallbacks", {"size": "struct_size", "module_table": "GetModuleFunctionTable"})
        program.layout("VersionInfo", "NvtxExportTableVersionInfo", {
            "size": "struct_size", "version": "version", "reserved": "reserved0", "set_version": "SetInjectionNvtxVersion"})
        for name, theirs in same.items():
            program.that(f"{numbers[name]} == {theirs}", f"{name} is another number")
        program.that(f"NVTX_CB_MODULE_SIZE == {sizes[1]}", "there are other modules")
        for number, (name, size) in enumerate(zip(modules, sizes[2].split(", "), strict=True), 1):
            program.that(f"NVTX_CB_MODULE_{name} == {number} && NVTX_CBID_{name}_SIZE == {size}", f"{name} has another size")
        program.run(f"nvtx.rs: {len(calls) + len(types)} calls, nvToolsExt.h {version}", [home])


assert SPECS
driver()
cufile()
dlpack()
nvtx()
finish()
