# Builds one library to preload from a tree of tcmalloc and one of Abseil, without the tests, which would need more
# projects. In the copy of tcmalloc's tree it takes the place of the CMakeLists.txt.
cmake_minimum_required(VERSION 3.24)
project(peer CXX C ASM)

set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
# As of the crate: functions are bound within the library, and thread-local variables are not looked up by calls.
add_compile_options(-fno-semantic-interposition -ftls-model=initial-exec)

set(ABSL_PROPAGATE_CXX_STD ON)
add_subdirectory("${ABSEIL}" abseil EXCLUDE_FROM_ALL)

include(tcmalloc/tcmalloc_helpers.cmake)
include(tcmalloc/tcmalloc_variants.cmake)
foreach(kind test test_variants binary binary_variants)
    function(tcmalloc_cc_${kind})
    endfunction()
endforeach()
# Libraries that only tests use name these, and are not built.
foreach(name GTest::gtest GTest::gtest_main GTest::gmock benchmark::benchmark fuzztest::fuzztest protobuf::libprotobuf)
    add_library(${name} INTERFACE IMPORTED GLOBAL)
endforeach()
add_subdirectory(tcmalloc/internal EXCLUDE_FROM_ALL)
add_subdirectory(tcmalloc/testing EXCLUDE_FROM_ALL)
add_subdirectory(tcmalloc EXCLUDE_FROM_ALL)

# Bazel's lists of sources are the authors' own, and CMake's lag behind: they have lacked tables of size classes.
file(GLOB tables RELATIVE "${CMAKE_SOURCE_DIR}/tcmalloc" tcmalloc/*_size_class.cc tcmalloc/*_size_classes.cc)
list(FILTER tables EXCLUDE REGEX "^want_")
get_target_property(listed tcmalloc_common_8k_pages SOURCES)
list(TRANSFORM listed REPLACE ".*/" "")
list(REMOVE_ITEM tables ${listed})
list(TRANSFORM tables PREPEND "${CMAKE_SOURCE_DIR}/tcmalloc/")
target_sources(tcmalloc_common_8k_pages PRIVATE ${tables})

add_library(peer SHARED $<TARGET_OBJECTS:tcmalloc_tcmalloc> $<TARGET_OBJECTS:tcmalloc_common_8k_pages>)
target_link_libraries(peer PRIVATE tcmalloc::tcmalloc)
target_link_options(peer PRIVATE "LINKER:-z,defs,-Bsymbolic,--version-script=${EXPORTS}")
