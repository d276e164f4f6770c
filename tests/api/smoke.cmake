# Some of the programs as ctest runs them, which needs neither Python nor an installed library: malloc and its relatives,
# fork, threads and counters, with the library preloaded, linked, and in a static program.
function(calm_smoke_test name options)
  add_test(NAME smoke-${name} COMMAND ${ARGN})
  set_tests_properties(smoke-${name} PROPERTIES TIMEOUT 3000 SKIP_RETURN_CODE 77 LABELS smoke)
  set_property(TEST smoke-${name} APPEND PROPERTY ENVIRONMENT "CALM_OPTIONS=${options}")
endfunction()

function(calm_preload name)
  set_property(TEST smoke-${name} APPEND PROPERTY ENVIRONMENT "LD_PRELOAD=$<TARGET_FILE:calmalloc>")
endfunction()

# A case of a program, or a program with its arguments.
function(calm_smoke_program options program)
  string(REPLACE ";" "-" name "${program};${ARGN}")
  calm_smoke_test(${name} ${options} ${program} ${ARGN})
  add_dependencies(tests ${program})
  if(program MATCHES "-plain$")
    calm_preload(${name})
  endif()
endfunction()

add_dependencies(tests calmalloc)
foreach(case
    zero-bytes huge-sizes products realloc-null realloc-zero posix-memalign-grants posix-memalign-refuses
    aligned-alloc usable-sizes sized-frees errno with-libc names calm-family calm-stats-sizes calm-stats-count
    calm-stats-json calm-get calm-set calm-trim)
  calm_smoke_program(background=off contracts-plain ${case})
endforeach()
foreach(case handlers handlers-lock stdio)
  calm_smoke_program(background=on forks-plain ${case})
endforeach()
foreach(case fork-storm child-frees spawn many-at-once thread-ends)
  calm_smoke_program(background=on processes-plain ${case})
endforeach()
foreach(way plain linked static)
  calm_smoke_program(background=on stress-${way} rounds=3)
endforeach()
foreach(way linked static)
  calm_smoke_program(background=off contracts-${way} calm-family)
endforeach()
if(CALM_OFFLOAD)
  calm_smoke_program(offload=on stress-plain rounds=2)
endif()

# A program that knows nothing of the library, and the line that it writes at the end.
calm_smoke_test(report report=exit ${CMAKE_COMMAND} -E echo said)
calm_preload(report)
set_tests_properties(smoke-report PROPERTIES PASS_REGULAR_EXPRESSION "\"footprint\": [1-9][0-9]*, \"in_use\": [1-9]")
