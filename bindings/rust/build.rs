//! Finds libfolio: in the directory FOLIO_LIB_DIR, or by pkg-config.

use std::{env, process::Command};

fn main() {
    println!("cargo:rerun-if-env-changed=FOLIO_LIB_DIR");
    println!("cargo:rerun-if-env-changed=PKG_CONFIG_PATH");
    let directory = env::var("FOLIO_LIB_DIR").unwrap_or_else(|_| pkg_config_directory());
    println!("cargo:rustc-link-search=native={directory}");
    println!("cargo:rustc-link-lib=dylib=folio");
    // Tests and examples of this package find the library where it was linked.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{directory}");
}

fn pkg_config_directory() -> String {
    let output = Command::new("pkg-config").args(["--variable=libdir", "folio"]).output();
    match output {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_string(),
        Ok(output) => panic!(
            "pkg-config does not find folio; set FOLIO_LIB_DIR or PKG_CONFIG_PATH: {}",
            String::from_utf8_lossy(&output.stderr)
        ),
        Err(error) => panic!("pkg-config does not run ({error}); set FOLIO_LIB_DIR to the directory of libfolio"),
    }
}
