# Install rules, in three components: libraries, development, tools.
include(CMakePackageConfigHelpers)

set(libraries calmalloc)
if(TARGET calmoffload)
  list(APPEND libraries calmoffload)
endif()
if(CALMALLOC_PTLBMALLOC2)
  list(APPEND libraries ptlbmalloc2)
endif()
# The unversioned name belongs to the libraries component, not to development: it is the name to preload.
install(
  TARGETS ${libraries}
  EXPORT calmalloc
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT libraries NAMELINK_COMPONENT libraries
)
install(
  TARGETS calmalloc_static
  EXPORT calmalloc
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development
)
install(
  DIRECTORY ${PROJECT_SOURCE_DIR}/include/
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT development
  FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp"
)

# gdb's commands. gdb loads them by itself where the library's path, below its own prefix, leads to them.
set(gdb ${PROJECT_SOURCE_DIR}/packaging/gdb/calmalloc.py)
install(FILES ${gdb} DESTINATION ${CMAKE_INSTALL_DATADIR}/calmalloc/gdb COMPONENT libraries)
if(CMAKE_INSTALL_PREFIX STREQUAL "/usr")
  install(
    FILES ${gdb}
    DESTINATION ${CMAKE_INSTALL_DATADIR}/gdb/auto-load${CMAKE_INSTALL_FULL_LIBDIR}
    RENAME libcalmalloc.so.${PROJECT_VERSION}-gdb.py
    COMPONENT libraries
  )
endif()

# find_package(calmalloc)
set(package ${CMAKE_INSTALL_LIBDIR}/cmake/calmalloc)
install(
  EXPORT calmalloc
  DESTINATION ${package}
  NAMESPACE calmalloc::
  FILE calmallocConfig.cmake
  COMPONENT development
)
# Before 1.0, a new minor version may change the interface.
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/installed/calmallocConfigVersion.cmake COMPATIBILITY SameMinorVersion
)
install(
  FILES ${PROJECT_BINARY_DIR}/installed/calmallocConfigVersion.cmake
  DESTINATION ${package}
  COMPONENT development
)

# pkg-config: paths relative to the file, so that the tree can be moved. Not for Debian packages, whose prefix is fixed.
if(CALMALLOC_DEBIAN OR IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}" OR IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
  set(pc_prefix ${CMAKE_INSTALL_PREFIX})
  set(pc_libdir ${CMAKE_INSTALL_FULL_LIBDIR})
  set(pc_includedir ${CMAKE_INSTALL_FULL_INCLUDEDIR})
else()
  file(RELATIVE_PATH up "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/.")
  string(REGEX REPLACE "/$" "" up ${up})
  set(pc_prefix "\${pcfiledir}/${up}")
  set(pc_libdir "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
  set(pc_includedir "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
configure_file(${PROJECT_SOURCE_DIR}/packaging/calmalloc.pc.in installed/calmalloc.pc @ONLY)
install(
  FILES ${PROJECT_BINARY_DIR}/installed/calmalloc.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
  COMPONENT development
)

set(man ${PROJECT_SOURCE_DIR}/docs/man)
install(FILES ${man}/calmalloc.3 DESTINATION ${CMAKE_INSTALL_MANDIR}/man3 COMPONENT development)
install(FILES ${man}/calmalloc.7 DESTINATION ${CMAKE_INSTALL_MANDIR}/man7 COMPONENT libraries)
if(CALMALLOC_PTLBMALLOC2)
  install(FILES ${man}/ptlbmalloc2.7 DESTINATION ${CMAKE_INSTALL_MANDIR}/man7 COMPONENT libraries)
endif()

if(CALMALLOC_TOOLS)
  # calm's modules are private, so they are installed outside Python's module path.
  set(share ${CMAKE_INSTALL_DATADIR}/calmalloc)
  set(libexec ${CMAKE_INSTALL_LIBEXECDIR}/calmalloc)
  install(TARGETS calm-probe RUNTIME DESTINATION ${libexec} COMPONENT tools)
  install(
    DIRECTORY ${PROJECT_SOURCE_DIR}/calm ${PROJECT_SOURCE_DIR}/calm_heap_readers
    DESTINATION ${share}
    COMPONENT tools
    FILES_MATCHING
    PATTERN "*.py"
    PATTERN "page/*"
    PATTERN "__pycache__" EXCLUDE
    PATTERN "probe" EXCLUDE
  )
  # By which calm finds its plug-in, as in a wheel: the entry points of pyproject.toml.
  set(metadata ${PROJECT_BINARY_DIR}/installed/calmalloc.dist-info)
  file(WRITE ${metadata}/entry_points.txt "[calm.heap_readers]\ncalm_heap_readers = calm_heap_readers:READERS\n")
  install(DIRECTORY ${metadata} DESTINATION ${share} COMPONENT tools)
  file(RELATIVE_PATH calm_modules "${CMAKE_INSTALL_FULL_BINDIR}" "${CMAKE_INSTALL_FULL_DATADIR}/calmalloc")
  set(calm_python "/usr/bin/env python3")
  if(CALMALLOC_DEBIAN)
    set(calm_python /usr/bin/python3)
  endif()
  configure_file(${PROJECT_SOURCE_DIR}/packaging/calm.in installed/calm @ONLY)
  install(PROGRAMS ${PROJECT_BINARY_DIR}/installed/calm DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
  install(FILES ${PROJECT_SOURCE_DIR}/packaging/grafana/calmalloc.json DESTINATION ${share}/grafana COMPONENT tools)
  install(FILES ${man}/calm.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT tools)

  # Each shell's directory for completions; Debian's zsh has a separate one for packages.
  set(completions ${PROJECT_SOURCE_DIR}/packaging/completions)
  set(zsh_functions ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
  if(CALMALLOC_DEBIAN)
    set(zsh_functions ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions)
  endif()
  install(
    FILES ${completions}/calm
    DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
    COMPONENT tools
  )
  install(FILES ${completions}/_calm DESTINATION ${zsh_functions} COMPONENT tools)
  install(
    FILES ${completions}/calm.fish
    DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d
    COMPONENT tools
  )

  # Links beside calm's modules, by which it finds the probe and the libraries under any prefix. Below /usr it needs
  # none.
  if(NOT CALMALLOC_DEBIAN)
    set(native ${CMAKE_INSTALL_FULL_DATADIR}/calmalloc/calm/_native)
    set(links ${PROJECT_BINARY_DIR}/installed/_native)
    file(REMOVE_RECURSE ${links})
    file(MAKE_DIRECTORY ${links})
    file(RELATIVE_PATH target ${native} ${CMAKE_INSTALL_FULL_LIBEXECDIR}/calmalloc/calm-probe)
    file(CREATE_LINK ${target} ${links}/calm-probe SYMBOLIC)
    foreach(library ${libraries})
      file(RELATIVE_PATH target ${native} ${CMAKE_INSTALL_FULL_LIBDIR}/lib${library}.so)
      file(CREATE_LINK ${target} ${links}/lib${library}.so SYMBOLIC)
    endforeach()
    install(DIRECTORY ${links} DESTINATION ${share}/calm COMPONENT tools)
  endif()

  # The contents of a wheel, in one folder, with unversioned names.
  install(PROGRAMS $<TARGET_FILE:calm-probe> DESTINATION . COMPONENT wheel EXCLUDE_FROM_ALL)
  foreach(library ${libraries})
    install(
      FILES $<TARGET_FILE:${library}>
      DESTINATION .
      RENAME lib${library}.so
      COMPONENT wheel
      EXCLUDE_FROM_ALL
    )
  endforeach()
endif()

if(NOT CALMALLOC_DEBIAN)
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT libraries)
endif()
