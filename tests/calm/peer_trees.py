"""Small source trees that stand for real ones: what `scripts/peers` relies on, and no more."""

# A library that preloads, and replaces nothing.
EMPTY = "int a_peer(void) { return 1; }\n"

MIMALLOC = {
    "CMakeLists.txt": """
cmake_minimum_required(VERSION 3.16)
project(a C)
add_library(mimalloc SHARED a.c)
""",
    "include/mimalloc.h": "#define MI_MALLOC_VERSION 30401   // major + 2 digits minor + 2 digits patch\n",
    "a.c": EMPTY,
}

SNMALLOC = {
    "CMakeLists.txt": """
cmake_minimum_required(VERSION 3.16)
project(a C CXX)
add_library(snmallocshim SHARED a.c)
""",
    "src/snmalloc/snmalloc.h": "",
    "vcpkg.json": """{
  "name": "snmalloc",
  "version-semver": "0.7.4"
}
""",
    "a.c": EMPTY,
}

RPMALLOC = {
    "rpmalloc/rpmalloc.c": f"""
#if !ENABLE_OVERRIDE || !ENABLE_PRELOAD
#error it would not take malloc's place
#endif
{EMPTY}""",
    "CHANGELOG": "2.0.1\n\nA change.\n\n2.0.0\n",
}

# Stands for configure, or for autogen.sh, which calls it.
JEMALLOC_SCRIPT = """#!/bin/sh
echo "${0##*/}" "$@" >arguments
cat >Makefile <<end
build_lib_shared:
	mkdir -p lib
	cc -shared -fPIC a.c -o lib/libjemalloc.so
end
"""
JEMALLOC = {
    "include/jemalloc/jemalloc.sh": "",
    "configure.ac": "AC_ARG_WITH([experimental_sys_process_madvise],\n",
    "ChangeLog": "Following are change highlights.\n\n* 5.3.1 (May 1, 2026)\n\n* 5.3.0 (May 6, 2022)\n",
    "a.c": EMPTY,
}

GPERFTOOLS = {
    "configure.ac": "AC_INIT([gperftools],[2.18.1],[a@b])\n",
    "src/gperftools/tcmalloc.h": "",
    "autogen.sh": """#!/bin/sh
cat >configure <<'end'
#!/bin/sh
test "$*" = "--enable-minimal --disable-static" && cp template.mk Makefile
end
chmod +x configure
""",
    "template.mk": """
libtcmalloc_minimal.la:
	mkdir -p .libs
	cc -shared -fPIC a.c -o .libs/libtcmalloc_minimal.so
""",
    "a.c": EMPTY,
}

SCUDO = {
    "cmake/Modules/LLVMVersion.cmake": """
if(NOT DEFINED LLVM_VERSION_MAJOR)
  set(LLVM_VERSION_MAJOR 21)
endif()
set(LLVM_VERSION_MINOR 1)
set(LLVM_VERSION_PATCH 2)
""",
    "compiler-rt/lib/scudo/standalone/wrappers_c.cpp": '#include "scudo/interface.h"\nint a_peer = NUMBER;\n',
    "compiler-rt/lib/scudo/standalone/include/scudo/interface.h": "enum { NUMBER };\n",
}

HARDENED_MALLOC = {
    "h_malloc.c": EMPTY,
    "Makefile": """
out/libhardened_malloc.so: h_malloc.c
	mkdir -p out
	$(CC) -std=c23 -shared -fPIC h_malloc.c -o $@
""",
}

TCMALLOC = {
    "tcmalloc/tcmalloc_helpers.cmake": """
function(tcmalloc_cc_test)
  message(FATAL_ERROR "tests need more than is here")
endfunction()
""",
    "tcmalloc/tcmalloc_variants.cmake": "",
    "tcmalloc/CMakeLists.txt": """
add_library(tcmalloc_common_8k_pages STATIC common.cc size_classes.cc)
add_library(tcmalloc_tcmalloc STATIC tcmalloc.cc)
add_library(tcmalloc::tcmalloc ALIAS tcmalloc_tcmalloc)
target_link_libraries(tcmalloc_tcmalloc PUBLIC tcmalloc_common_8k_pages absl_base)
add_library(for_tests STATIC common.cc)
target_link_libraries(for_tests GTest::gtest)
tcmalloc_cc_test(NAME a_test)
""",
    "tcmalloc/internal/CMakeLists.txt": "",
    "tcmalloc/testing/CMakeLists.txt": "",
    "tcmalloc/tcmalloc.cc": "int common();\nint a_peer() { return common(); }\n",
    "tcmalloc/common.cc": """
int base(), listed(), forgotten();
int common() { return base() + listed() + forgotten(); }
""",
    "tcmalloc/size_classes.cc": "int listed() { return 0; }\n",
    # In bazel's list, but not in CMake's.
    "tcmalloc/more_size_classes.cc": "int forgotten() { return 0; }\n",
    "tcmalloc/want_no_size_classes.cc": "#error a switch that is not wanted\n",
}
ABSEIL = {
    "absl/base/config.h": "",
    "CMakeLists.txt": "add_library(absl_base STATIC base.cc)\n",
    "base.cc": "int base() { return 0; }\n",
}
