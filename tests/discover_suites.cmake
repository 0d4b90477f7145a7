# Lists the suites of a GoogleTest binary as tests of ctest: one process a suite, for each has to load libtorch, which takes longer than most cases do.
# tools/run_tests counts the cases. Run after the binary was linked:
#   cmake -D BINARY=... -D PREFIX=room. -D OUTPUT=file.cmake -D TIMED="Suite;Other" -D TIMEOUT=600 -P discover_suites.cmake
cmake_minimum_required(VERSION 3.22)
execute_process(COMMAND ${BINARY} --gtest_list_tests OUTPUT_VARIABLE listing RESULT_VARIABLE failed)
if(failed)
  file(REMOVE ${BINARY})
  message(FATAL_ERROR "${BINARY} --gtest_list_tests failed: ${failed}")
endif()
string(REGEX MATCHALL "(^|\n)[A-Za-z0-9_/]+\\." suites "${listing}")
list(TRANSFORM suites REPLACE "[\n.]" "")
# Instantiations of a parameterized suite (`Worlds/Ring/3` of typed ones, `Worlds/Ring` of others) run together under the suite's own name.
set(names)
foreach(suite ${suites})
  string(REGEX REPLACE "/[0-9]+$" "" suite "${suite}")
  string(REGEX REPLACE "^[A-Za-z0-9_]+/" "" suite "${suite}")
  list(APPEND names ${suite})
endforeach()
list(REMOVE_DUPLICATES names)
set(script "")
foreach(name ${names})
  set(labels unit)
  if(name IN_LIST TIMED)
    list(APPEND labels timing)
  endif()
  string(APPEND script "add_test([=[${PREFIX}${name}]=] [=[${BINARY}]=] [=[--gtest_filter=${name}.*:*/${name}.*:${name}/?.*:*/${name}/?.*]=])\n"
    "set_tests_properties([=[${PREFIX}${name}]=] PROPERTIES LABELS [=[${labels}]=] TIMEOUT ${TIMEOUT} ENVIRONMENT OMP_NUM_THREADS=1)\n")
endforeach()
file(WRITE ${OUTPUT} "${script}")
