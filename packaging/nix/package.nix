# calmalloc, calmoffload, ptlbmalloc2 and calm, for nixpkgs' callPackage.
{
  lib,
  stdenv,
  cmake,
  ninja,
  python3,
}:

let
  lines = builtins.split "\n" (builtins.readFile ../../include/calmalloc.h);
  release = line: builtins.match "#define CALM_RELEASE \"([0-9.]+)\"" line;
  isRelease = line: builtins.isString line && release line != null;
  python = python3.withPackages (modules: [
    modules.click
    modules.jinja2
    modules.matplotlib
    modules.msgspec
    modules.numpy
    modules.optuna
    modules.plotly
    modules.prometheus-client
    modules.pyelftools
    modules.rich
  ]);
in
stdenv.mkDerivation {
  pname = "calmalloc";
  version = builtins.head (release (builtins.head (builtins.filter isRelease lines)));
  src = lib.cleanSourceWith {
    src = lib.cleanSource ../..;
    filter =
      path: type:
      !builtins.elem (baseNameOf path) [
        "build"
        ".venv"
      ];
  };

  nativeBuildInputs = [
    cmake
    ninja
  ];
  # calm begins with "/usr/bin/env python3", which the patch phase points at this Python.
  buildInputs = [ python ];

  cmakeFlags = [
    "-DCALMALLOC_STRICT=OFF"
    "-DCALMALLOC_TESTS=OFF"
    "-DCALMALLOC_WORKLOADS=OFF"
  ];

  meta = {
    description = "Memory allocator that returns memory with few TLB shootdowns";
    license = lib.licenses.mit;
    platforms = [
      "x86_64-linux"
      "aarch64-linux"
    ];
    mainProgram = "calm";
  };
}
