"""What the tokenizer cuts names and words into: how they start, and how they go on.

Names put together from these teach the model to copy every token, also one that the known names hardly ever need.
"""

STARTS = """
A After All Am Ame An And Ant Ar Are As At B Bar Be Bet Bis Bl Bla Bli Bor Both Bra Bro Bron But By C Car Ch Cha Char
Che Chi Cl Cli Clo Co Con Cook Cra Crack Cri Cro D Dais Dan Day Days De Dec Di Die Dra Dre Dri Dro Dy E Each Ed El Em
Even Every F Fat Fe First Fiz Fl Fla Flu For Fra Fre Fro From G Ga Ge Gem Geor Give Gl Gla Glo Gra Gro H Hal Half Ham
Han Har He Help Hen Her Hi His Hone I In Is It J Jab Jac Ji Jo Ju K Kar Kas Kat Ke Kra Kro Kub L Lar Later Le Lin
Lindi Lo Lu Luc Luck M Mais Man Mar Mare Mart Mas Mat Me Mi Mig Min Mo Mor More Mu N Na Nad Nat Near No Nor Now Nut O
Oli On One Only P Pa Pal Pat Pe Per Pet Pi Pl Pla Plo Po Pra Pri Pro Qu R Raf Ro Ru Ry S Sak Sh Sha Shad Shall She Sho
Sig Since Sip Sk Sl Sla Sn Sna Sne Snow So Sof Soon Sp St Stan Ste Step Sto Su T Tam Te Tell Th Tha Thank That The
Then There They This Thu To Tra Tri Tro Tu Tw U Under Up V Vic Vik W Waff We Wh When With Would Y You Z Za Zig Zu
""".split()

ENDS = """
ab ac ach ack acla aclav ad ade ady ael af aff ag aga age ah ai ain ais aisa ait ak ake akes akub al ala ali all alle
allum ally am amb ame amed amp amper an anc ance ancy and anda ands ang ange anj anjay anket ant ante anted anut any
ao ap aple ar ara arah ard ards are ari ariq ark arn aro aroo arrow art ary as ase asel ash ass ast asure at ate ater
ath ather ati au ause av ave aves avy avya awn ax ay aya ays ball bble bby ber bert ble bo board bod body bour bow bra
brush bug but by can ce celet ces cess cha ched chen chie cil cket co cod come coon cope corn cto ctor cu cuit cy da
day ddie de der dette dge die dris dy eady eak ean ear ec eck ed eddy edge eds edy ee eet ek el ell ella ello em en
ena ence ened enia enk enly enny ent ep eped er era erday ere ered erent erful eri ern erret ers ert es ese est et eth
eting ette ever eze fa fall fe fect ffin ffy fly fore fter ful full ga gar ge ger gest get ghter ghty gie gle go gon
grid gry gu gy ha han hank hant hat he head hed hel hen hene her here hes hest hi hich hil hin hind hing hino his ho
hog host house hy hys ia iam iamh ib ic ice ick ickly id ide ider idge idi ie iel ier ies iest iet if ife iff ig igg
igh ight ik ikhil iko il ila ild ilda ile iled ill illa illow illy ils ilt ily im ima imal imp in ina ince ind indi
ine ing inger ingo ining ink inn ino inted iny io iolet ion ions ip ir ira iran ire irrel irse irst irt iru is ise
ised ish isha isit iska isp issed ist it ita ite ited ith itri ity itz iv ival ive ives ix ixed iz ja jali ji jun ka
kas ke ked ken ket key ki kin king ko la lace lack lag lai lam lama lan land lbert ldren le lease led lee leep lep les
less let lew lex li lia lican lie lin ling lite lix lla lled llen llo lly lmi lo long loo los lour lphin lse lu ly ma
man mani mble me med memb men mer mi mill ming mitri most munk my na nah ndays nder ndi ndred ndy ne ner nes ness net
ney ngus nic night ning nome noon not now ny ob oc ock oco od oe of og oife ok old ole oll ollow olly om oma ome omo
omp on onan onas ond one ong onkey ony oo ood oof ook oom oon oos oose oosh op ope ople or ora ord ordan ore orn orrow
orse ort orto os osa ose osh osie ost osy ot oth other oto otr ott otte otted otten ou oud ough ought ouis ould ound
ount our ous ouse out outed ove ow owly own pack pal pe phie pill pped pper ppet ppo ppy pty pus qu ra raff rage rai
raid ram ran rank rat raw re ready red ree rel rella ren ret rew ri rible rid rie ried rieda riend ries riet rik ring
rious rip ris rise rite rix ro roll rom ron rong roo room ror rot rough round rove row ru rum rumb rus ry se sed sel
self ser sert side sie sket ssed ssist stal ster sther stle strid sy te ted tell ten ter thing thur ti ting tle to ton
tor ty ub ubb uc uch uck ue uel uf ug ugg ught uit ul ull ulu um uma umb umn ump umpet umpy umsy un una ungle unk unny
ur ura ure urp us ush ushed ushi usie ust usty ut ute uth utif va van ve ved ven vent ver vered very ves vi vice vie
vin von vonne vour vous vy wa wake wame ward way we wen wer what where wis woo wyn ya yn yst za zard ze zen zi zra zy
""".split()
