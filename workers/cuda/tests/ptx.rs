//! The committed PTX belongs to the committed source.
//!
//! `FIEC_NVRTC=/path/to/libnvrtc.so.11.2 FIEC_UPDATE=1 cargo test -p fiec-cuda --test ptx` makes it
//! again. NVRTC needs no device; `pip download nvidia-cuda-nvrtc-cu11==11.8.89` has it.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use fiec_cuda::{PTX, SOURCE};

/// As NVRTC names it: any driver since 384 compiles it for any device since Pascal.
const TARGET: &str = "compute_60";
/// The version of PTX that is asked for: the kernels use nothing newer.
const VERSION: &str = ".version 6.0";
/// Another version of NVRTC makes other PTX, so that only this one is compared with.
const NVRTC: (c_int, c_int) = (11, 8);

fn digest() -> String {
    blake3::hash(SOURCE.as_bytes()).to_hex().to_string()
}

fn head() -> String {
    format!(
        "// Made from kernels.cu by NVRTC {}.{} for {TARGET}, then declared as PTX 6.0.\n\
         // BLAKE3 of kernels.cu: {}\n\
         // To make it again: see tests/ptx.rs.\n",
        NVRTC.0,
        NVRTC.1,
        digest()
    )
}

#[test]
fn the_ptx_was_made_from_this_source() {
    assert!(
        PTX.starts_with(&head()),
        "kernels.cu has changed since kernels.ptx was made from it (its BLAKE3 is {}): make it \
         again as the head of tests/ptx.rs says",
        digest()
    );
}

#[test]
fn every_operation_of_the_ptx_is_rounded_once_and_to_nearest() {
    assert!(PTX.contains("\n.version 6.0\n.target sm_60\n"));
    let mut fused = 0;
    for line in PTX.lines().map(str::trim) {
        let operation = line.split_whitespace().next().unwrap_or("");
        let arithmetic = ["add", "sub", "mul", "div", "sqrt", "fma", "mad", "rcp"]
            .iter()
            .any(|name| operation.starts_with(&format!("{name}.")));
        if arithmetic && operation.ends_with(".f64") {
            assert!(operation.contains(".rn."), "{line}");
            fused += u32::from(operation.starts_with("fma."));
        }
        assert!(
            !operation.contains(".ftz") && !operation.contains(".f32"),
            "{line}"
        );
    }
    assert!(fused > 100, "only {fused} fused operations");
}

#[test]
fn the_ptx_is_what_nvrtc_makes_of_the_source() {
    let update = std::env::var_os("FIEC_UPDATE").is_some();
    let Some(library) = nvrtc() else {
        assert!(!update, "FIEC_UPDATE needs FIEC_NVRTC=/path/to/libnvrtc.so");
        eprintln!("SKIPPED: there is no NVRTC here; FIEC_NVRTC=/path/to/libnvrtc.so names one");
        return;
    };
    let (version, made) = compile(&library);
    if version != NVRTC {
        assert!(!update, "the PTX is made by NVRTC {NVRTC:?}");
        eprintln!("SKIPPED: NVRTC here is {version:?}, and the PTX was made by {NVRTC:?}");
        return;
    }
    let made = format!("{}{made}", head());
    if update {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/kernels.ptx");
        std::fs::write(path, made).unwrap();
        return;
    }
    // Comments name the build of the compiler.
    let bare = |text: &str| -> Vec<String> {
        let lines = text
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"));
        lines.map(str::to_owned).collect()
    };
    assert!(bare(PTX) == bare(&made), "kernels.ptx is not what it makes");
}

fn nvrtc() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("FIEC_NVRTC") {
        return Some(path.into());
    }
    ["/usr/local/cuda/lib64", "/usr/local/cuda-11.8/lib64"]
        .iter()
        .map(|folder| Path::new(folder).join("libnvrtc.so"))
        .find(|path| path.exists())
}

#[allow(unsafe_code)]
fn compile(library: &Path) -> ((c_int, c_int), String) {
    use libloading::{Library, Symbol};
    // What it loads by name lies beside it, and is found when it is loaded already.
    let beside = std::fs::read_dir(library.parent().unwrap()).unwrap();
    let builtins: Vec<Library> = beside
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("libnvrtc-builtins.so")
        })
        // SAFETY: NVIDIA's own libraries.
        .filter_map(|path| unsafe { Library::new(path) }.ok())
        .collect();
    type Program = *mut c_void;
    type Text = *const c_char;
    // SAFETY: the functions are declared so in nvrtc.h; pointers are to what lives here.
    unsafe {
        let nvrtc = Library::new(library).unwrap();
        let version: Symbol<'_, unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int> =
            nvrtc.get(b"nvrtcVersion").unwrap();
        let create: Symbol<
            '_,
            unsafe extern "C" fn(
                *mut Program,
                Text,
                Text,
                c_int,
                *const Text,
                *const Text,
            ) -> c_int,
        > = nvrtc.get(b"nvrtcCreateProgram").unwrap();
        let run: Symbol<'_, unsafe extern "C" fn(Program, c_int, *const Text) -> c_int> =
            nvrtc.get(b"nvrtcCompileProgram").unwrap();
        let size: Symbol<'_, unsafe extern "C" fn(Program, *mut usize) -> c_int> =
            nvrtc.get(b"nvrtcGetPTXSize").unwrap();
        let take: Symbol<'_, unsafe extern "C" fn(Program, *mut c_char) -> c_int> =
            nvrtc.get(b"nvrtcGetPTX").unwrap();
        let (mut major, mut minor) = (0, 0);
        assert_eq!(version(&raw mut major, &raw mut minor), 0);
        let (source, name) = (CString::new(SOURCE).unwrap(), c"kernels.cu");
        let mut program: Program = std::ptr::null_mut();
        let made = create(
            &raw mut program,
            source.as_ptr(),
            name.as_ptr(),
            0,
            std::ptr::null(),
            std::ptr::null(),
        );
        assert_eq!(made, 0);
        let options = [
            CString::new(format!("--gpu-architecture={TARGET}")).unwrap(),
            CString::new("--fmad=false").unwrap(),
        ];
        let pointers = options.each_ref().map(|option| option.as_ptr());
        let count = c_int::try_from(pointers.len()).unwrap();
        assert_eq!(
            run(program, count, pointers.as_ptr()),
            0,
            "does not compile"
        );
        let mut bytes = 0;
        assert_eq!(size(program, &raw mut bytes), 0);
        let mut text = vec![0u8; bytes];
        assert_eq!(take(program, text.as_mut_ptr().cast()), 0);
        let text = CStr::from_bytes_until_nul(&text).unwrap();
        let text = text.to_str().unwrap();
        let declared = text
            .lines()
            .find(|line| line.starts_with(".version "))
            .unwrap();
        let text = text.replacen(declared, VERSION, 1);
        drop(builtins);
        ((major, minor), text)
    }
}
